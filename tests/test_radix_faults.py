"""Faults of prefix caches that have been seen elsewhere, each by its number: what happens here instead.

Without a model (tests.scheduling.Rig): a key that is lost, overwritten or never computed shows as a wrong number, and a
request that reads one fails the test at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.tiny import cached_tiny_model
from tests.checking import CheckingPool
from tests.oracle import assert_greedy
from tests.scheduling import VOCAB, Job, Rig, own_prompt, part


def request(rig: Rig, rid: int, tokens: list[int]) -> Any:
    """A request that no scheduler knows."""
    return rig.core.Req(rid, list(tokens), len(tokens), rig.chapter.SamplingParams(), 8)


def computed(rig: Rig, rid: int, tokens: list[int]) -> Any:
    """A request that has its pages and has computed all its tokens, and has shared nothing yet."""
    req = request(rig, rid, tokens)
    rig.kv.allocate(req, len(tokens))
    req.cached_len = len(tokens)
    return req


# ---- 3: two equal prompts in one batch, and the pages of one are freed while it still reads them


def test_fault_3_pages_computed_twice_end_as_one_and_the_others_are_free(sharing_chapter):
    rig = Rig(sharing_chapter, page_size=4, capacity=24)
    kv, tokens = rig.kv, list(range(10, 19))
    first, second = computed(rig, 0, tokens), computed(rig, 1, tokens)
    assert (first.pages, second.pages) == ([0, 1, 2], [3, 4, 5])
    kv.commit(first)
    kv.commit(second)
    assert second.pages == [0, 1, 5], "it reads the canonical pages from the moment on in which its own are free"
    assert kv.ledger() == {"free": 2, "cached": 2, "owned": 2, "total": 6}
    third = request(rig, 2, [90] * 8)
    kv.allocate(third, 8)
    assert sorted(third.pages) == [3, 4], "whoever comes next gets the doubles"
    for req in (first, second, third):
        kv.free(req)
    assert kv.ledger()["owned"] == 0 and kv.tree.protected == 0


def test_fault_3_a_request_goes_on_reading_when_another_has_shared_the_same_pages_first(sharing_chapter):
    """One ends and shares its answer in the very step in which a prefill computes the same tokens; a third overwrites."""
    rig = Rig(sharing_chapter, page_size=2, capacity=64, budget=64)
    first = rig.add(Job(0, [5, 6, 7], max_tokens=6))
    rig.step()
    for _ in range(4):
        rig.step()
    known = list(first.token_ids)
    assert len(known) == 8
    second = rig.add(Job(1, [*known, 20, 21], max_tokens=8))
    rig.step()
    assert 0 in rig.ends and second.state.name == "DECODE"
    tree = [page for node in rig.kv.tree.nodes() for page in node.pages]
    assert second.shared == 5 and set(second.pages[:5]) <= set(tree)
    rig.submit(2, 20, 4)
    rig.run()  # every read is checked
    rig.check_idle()


# ---- 11: a partial hit does not count as use; a look changes the tree


def test_fault_11_a_partial_hit_refreshes_what_it_hit(sharing_chapter):
    tree = part(sharing_chapter, "radix").RadixTree(2)
    tree.insert([1, 1, 2, 2, 3, 3], [10, 11, 12])
    tree.insert([5, 5, 6, 6], [20, 21])
    assert tree.match([1, 1, 2, 2, 9, 9], 6) == 4
    assert tree.evict(2) == [21, 20], "the other prefix is older now"


def test_fault_11_looking_changes_nothing_but_the_time(sharing_chapter):
    tree = part(sharing_chapter, "radix").RadixTree(2)
    tree.insert([1, 1, 2, 2, 3, 3], [10, 11, 12])
    [node] = tree.nodes()
    before = (list(node.tokens), list(node.pages), node.parent, dict(node.children), node.locks)
    for tokens in ([1, 1, 2, 2, 9, 9], [1, 1], [1, 9], [], [1, 1, 2, 2, 3, 3, 4]):
        tree.match(tokens, len(tokens))
    assert list(tree.nodes()) == [node], "not split"
    assert before == (node.tokens, node.pages, node.parent, node.children, node.locks)
    assert (tree.pages, tree.protected) == (3, 0)


def test_fault_11_a_prefix_in_use_by_others_outlives_one_that_is_not(sharing_chapter):
    """The same in a running engine: a pool for three prompts; the shared one is asked for again and again."""
    rig = Rig(sharing_chapter, page_size=2, capacity=36, max_running=1)
    system = own_prompt(50, 8)
    for rid in range(8):
        rig.add(Job(rid, [*system, *own_prompt(rid, 6)], max_tokens=1))
        rig.run()
    assert [rig.cached[rid] for rid in range(8)] == [0] + [8] * 7
    rig.check_idle()


# ---- 13: a prompt that is cached to its last token, in whole pages


@pytest.mark.parametrize("pages", (1, 2, 5))
def test_fault_13_of_a_fully_cached_prompt_the_last_page_is_computed_again_and_gives_the_logits(sharing_chapter, pages):
    """One token would do; but its page is the tree's, which nobody writes."""
    rig = Rig(sharing_chapter, page_size=4, capacity=256)
    prompt = own_prompt(7, 4 * pages)
    rig.add(Job(0, prompt, max_tokens=3))
    rig.run()
    assert rig.kv.match(request(rig, 9, prompt)) == 4 * (pages - 1)
    rig.add(Job(1, prompt, max_tokens=3))
    assert rig.run()[0] == {1: 4}
    assert rig.cached[1] == 4 * (pages - 1) and rig.output[0] == rig.output[1]
    rig.check_idle()


def test_fault_13_one_token_more_and_only_that_one_is_computed(sharing_chapter):
    rig = Rig(sharing_chapter, page_size=4, capacity=256)
    prompt = own_prompt(7, 9)
    for rid in (0, 1):
        rig.add(Job(rid, prompt, max_tokens=1))
        rig.run()
    assert rig.steps == [{0: 9}, {1: 1}] and rig.cached[1] == 8


def test_fault_13_a_prompt_of_one_token_finds_nothing(sharing_chapter):
    rig = Rig(sharing_chapter, page_size=1, capacity=64)
    for rid in (0, 1):
        rig.add(Job(rid, [5], max_tokens=4))
        rig.run()
    assert rig.cached == {0: 0, 1: 0}
    rig.check_idle()


# ---- 14: a preempted request comes back with the lengths it had


def preempted(module: Any) -> tuple[Rig, Any]:
    """A rig whose second request has just lost its pages, after 2 of its 5 tokens."""
    rig = Rig(module, capacity=16, page_size=4)
    rig.submit(0, 7, 5)
    young = rig.submit(1, 7, 5)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.preemptions == 1
    return rig, young


def test_fault_14_a_preempted_request_waits_without_pages_and_without_a_hold_on_the_tree(sharing_chapter):
    rig, young = preempted(sharing_chapter)
    assert young.state.name == "WAITING" and young.length == 9 and young.sent_len == 9
    assert (young.cached_len, young.pages, young.shared, young.prefix) == (0, [], 0, None)
    assert rig.kv.tree.protected == sum(req.shared for req in rig.scheduler.running)


def test_fault_14_it_comes_back_with_what_the_tree_has_then(sharing_chapter):
    """Its lengths are taken anew when it begins again: a hit of its own tokens, the answer's included, and no more."""
    rig, young = preempted(sharing_chapter)
    while young.state.name == "WAITING":
        found = rig.kv.match(young)
        step = rig.step()
    assert 0 < found < young.length and found % 4 == 0
    assert step[1] == 9 - found
    rig.run()
    assert rig.cached[1] == 0 and rig.scheduler.hit_tokens == 0
    rig.check_idle()


def test_fault_14_what_the_model_is_given_after_a_preemption_is_right_in_every_position(sharing_chapter):
    """The step's tensors, through the whole engine: positions, slots and lengths of what is left to compute."""
    folder = cached_tiny_model("llama")
    token = part(sharing_chapter, "kvcache").token_bytes(3, 2, 16, torch.float32)
    options = {"page_size": 4, "kv_memory": str(16 * token), "dtype": "float32", "threads": 1}
    with sharing_chapter.LLM(str(folder), **options) as llm:
        pool = CheckingPool(llm.engine)
        prompts = [own_prompt(rid, 7) for rid in (100, 200)]
        outputs = llm.generate(prompts, sharing_chapter.SamplingParams(max_tokens=5, ignore_eos=True), progress=False)
        assert llm.stats()["preemptions"] == 1 and pool.reads > 0
    for output in outputs:
        assert_greedy(folder, output.prompt_token_ids, output.token_ids)


# ---- 15: the last chunk of a prompt


@pytest.mark.parametrize("length", (7, 8, 9, 16, 17, 24))
@pytest.mark.parametrize("cached", (0, 8, 16))
def test_fault_15_only_the_chunk_that_ends_the_prompt_gives_a_token(sharing_chapter, length, cached):
    """Chunks of 8 after whatever is cached, to the very end of the prompt and not beyond."""
    rig = Rig(sharing_chapter, page_size=4, capacity=256, budget=8)
    prompt = own_prompt(3, 30)
    if cached:
        rig.add(Job(0, prompt[:cached], max_tokens=1))
        rig.run()
    rig.steps.clear()
    rig.add(Job(1, prompt[:length], max_tokens=2))
    hit = min(cached, (length - 1) // 4 * 4)
    chunks = [8] * ((length - hit) // 8) + ([(length - hit) % 8] if (length - hit) % 8 else [])
    for chunk in chunks:
        assert rig.output[1] == [], "no token from a chunk that is not the last one"
        assert rig.step() == {1: chunk}
    assert len(rig.output[1]) == 1 and rig.cached == ({0: 0} if cached else {})
    assert rig.run() == [{1: 1}]
    assert rig.cached[1] == hit
    rig.check_idle()


def test_fault_15_a_chunk_that_ends_inside_a_page_shares_only_what_is_full(sharing_chapter):
    rig = Rig(sharing_chapter, page_size=4, capacity=256, budget=6)
    req = rig.submit(0, 20, 1)
    for full in (1, 3, 4):
        rig.step()
        assert req.shared == rig.kv.tree.pages == full
    rig.run()
    rig.check_idle()


# ---- 16: an entry for a page that has been given to others; equal prompts in one step


def test_fault_16_an_evicted_prefix_is_never_found_again(sharing_chapter):
    """The pool holds one prompt: each one overwrites the pages of the one before, and nobody finds them."""
    rig = Rig(sharing_chapter, page_size=4, capacity=16)
    for rid in range(6):
        rig.add(Job(rid, own_prompt(rid % 2, 13), max_tokens=1))
        rig.run()
        assert rig.kv.match(request(rig, 90, own_prompt((rid + 1) % 2, 13))) == 0
        assert rig.kv.match(request(rig, 91, own_prompt(rid % 2, 13))) == 12
    assert set(rig.cached.values()) == {0}
    rig.check_idle()


def test_fault_16_after_a_flush_nothing_is_found_but_what_runs_is_kept(sharing_chapter):
    rig = Rig(sharing_chapter, page_size=4, capacity=256)
    rig.submit(0, 9, 1)
    rig.run()
    rig.submit(1, 9, 4)
    rig.step()
    rig.kv.flush()
    rig.check()
    found = [rig.kv.match(request(rig, 90 + rid, own_prompt(rid, 9))) for rid in (0, 1)]
    assert found == [0, 8] and rig.kv.ledger()["cached"] == 2
    rig.run()
    rig.check_idle()


def test_fault_16_equal_prompts_that_come_in_one_step_are_computed_once(sharing_chapter):
    """Those behind the first wait for its pages, and compute what is their own: a token, or a last page."""
    rig = Rig(sharing_chapter, page_size=4, capacity=1024, max_running=16, budget=256)
    for rid in range(8):
        rig.add(Job(rid, own_prompt(99, 41), max_tokens=2, salt=rid))
    assert rig.run()[:2] == [{0: 41}, dict.fromkeys(range(8), 1)]
    assert rig.scheduler.hit_tokens == 7 * 40
    rig.check_idle()


def test_fault_16_the_wait_for_a_prefix_ends_with_the_prefill_that_computes_it(sharing_chapter):
    """Chunk by chunk; and where that prefill is aborted, the next one computes what is left."""
    rig = Rig(sharing_chapter, page_size=4, capacity=1024, budget=8)
    prompt = own_prompt(99, 40)
    for rid in range(3):
        rig.add(Job(rid, [*prompt, VOCAB + 200 + rid], max_tokens=1, aborts=[3] if rid == 0 else []))
    assert [rig.step() for _ in range(3)] == [{0: 8}] * 3
    rig.abort(0)
    assert rig.run() == [{1: 8}, {1: 8}, {1: 1, 2: 1}]
    assert rig.cached == {0: 0, 1: 24, 2: 40}
    rig.check_idle()


def test_fault_16_nobody_waits_for_a_page_that_it_computes_itself_in_any_case(sharing_chapter):
    """The second prompt is two pages: it finds one, and its last page is its own to compute."""
    rig = Rig(sharing_chapter, page_size=4, capacity=1024, budget=8)
    prompt = own_prompt(99, 9)
    rig.add(Job(0, prompt, max_tokens=1))
    rig.add(Job(1, prompt[:8], max_tokens=1))
    assert rig.run() == [{0: 8}, {0: 1, 1: 4}]
    rig.check_idle()


def test_fault_16_nobody_waits_for_a_prefix_that_nobody_computes(sharing_chapter):
    """Prompts that share less than a page, or nothing, run side by side at once."""
    rig = Rig(sharing_chapter, page_size=4, capacity=1024, budget=64)
    for rid in range(4):
        rig.add(Job(rid, [1, 2, 3, VOCAB + rid, 5, 6], max_tokens=1))
    assert rig.run() == [dict.fromkeys(range(4), 6)]
    rig.check_idle()
