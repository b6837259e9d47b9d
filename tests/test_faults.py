"""Faults that other engines had, where no other test file has a natural place for them; docs/faults.md lists all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from common.tiny import cached_tiny_model
from tests.conftest import BATCHING, CHAPTERS, ENGINES, chapter
from tests.engine_runs import run
from tests.oracle import assert_greedy
from tests.scheduling import VOCAB, Job, Rig, own_prompt, part

PAGED = [name for name in BATCHING if name > "ch07"]
SHARING = [name for name in BATCHING if name > "ch08"]
GUESSING = [name for name in CHAPTERS if name > "ch10"]
CACHING = [name for name in ENGINES if name > "ch04"]


def tiny(module: ModuleType, **options: Any) -> Any:
    fixed = {"dtype": "float32", "threads": 1, "debug_invariants": True}
    return module.LLM(str(cached_tiny_model("llama")), **{**fixed, **options})


def memory(module: ModuleType, tokens: int) -> str:
    """kv_memory that holds so many tokens of the tiny model."""
    return str(tokens * part(module, "kvcache").token_bytes(3, 2, 16, torch.float32))


# ---- memory


@pytest.mark.fault(3)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", SHARING)
def test_equal_prompts_in_a_tiny_pool_never_read_what_a_third_request_wrote(name: str, seed: int) -> None:
    """Rig checks after every step that each token a request reads is its own."""
    rng = random.Random(seed)
    rig = Rig(chapter(name), capacity=40, page_size=4, max_running=6, budget=40)
    twins = [own_prompt(rng.randrange(3), rng.choice((4, 8, 12, 13))) for _ in range(4)]
    for rid in range(16):
        rig.add(Job(rid, rng.choice(twins), max_tokens=rng.randint(1, 9), salt=rng.choice((0, rid))))
        for _ in range(rng.randrange(3)):
            rig.step()
    rig.run()
    rig.check_idle()


@pytest.mark.fault(4)
@pytest.mark.parametrize("name", PAGED)
def test_requests_of_one_token_are_admitted_by_pages_and_not_by_tokens(name: str) -> None:
    """8 requests that grow to 32 tokens each would be 256 tokens, as many as 4 pages of 64 hold: but one page each."""
    rig = Rig(chapter(name), capacity=256, page_size=64)
    for rid in range(8):
        rig.submit(rid, 1, 31)
    assert max(len(step) for step in rig.run()) == 4
    rig.check_idle()


@pytest.mark.fault(21)
@pytest.mark.parametrize("name", PAGED)
def test_what_outgrows_the_whole_pool_is_refused_at_the_door_with_both_numbers(name: str) -> None:
    module = chapter(name)
    with tiny(module, kv_memory=memory(module, 64), page_size=16) as llm:
        params = [module.SamplingParams(max_tokens=n, ignore_eos=True) for n in (45, 46)]
        fits, grows = run(llm, [[5] * 20] * 2, params)
    assert (fits.finish_reason, len(fits.token_ids)) == ("length", 45)
    assert (grows.finish_reason, grows.token_ids) == ("error", [])
    assert "64" in grows.error and "20" in grows.error


@pytest.mark.fault(21)
@pytest.mark.parametrize("name", PAGED)
def test_who_names_no_max_tokens_gets_what_the_whole_pool_can_hold(name: str) -> None:
    """The last token needs no place: 20 + 44 in the pool, and one more."""
    module = chapter(name)
    with tiny(module, kv_memory=memory(module, 64), page_size=16) as llm:
        fits, grows = run(llm, [[5] * 20, [5] * 65], module.SamplingParams(ignore_eos=True))
    assert (fits.finish_reason, len(fits.token_ids)) == ("length", 45)
    assert (grows.finish_reason, grows.token_ids) == ("error", [])
    assert "64" in grows.error and "65" in grows.error


@pytest.mark.fault(25)
@pytest.mark.parametrize("name", PAGED)
def test_requests_that_may_become_long_but_stop_early_run_side_by_side(name: str) -> None:
    """The pool would hold three of them at their longest; it takes what they need now."""
    rig = Rig(chapter(name), capacity=3 * 210, page_size=2, max_running=40, budget=500)
    for rid in range(40):
        rig.add(Job(rid, own_prompt(rid, 10), max_tokens=200, salt=rid, stop_token_ids=tuple(range(0, VOCAB, 2))))
    assert max(len(step) for step in rig.run()) == 40
    assert rig.scheduler.preemptions == 0
    rig.check_idle()


# ---- prefixes


def tree_of(name: str, page_size: int = 2) -> Any:
    return part(chapter(name), "radix").RadixTree(page_size)


@pytest.mark.fault(11)
@pytest.mark.parametrize("name", SHARING)
def test_a_hit_on_a_part_of_a_node_makes_it_recent(name: str) -> None:
    tree = tree_of(name)
    tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
    tree.insert([7, 8, 9, 9], [3, 4])
    assert tree.match([1, 2, 3, 4, 0, 0], 6) == 4
    assert sorted(tree.evict(2)) == [3, 4], "the other prefix is the older one"
    assert tree.match([1, 2, 3, 4, 5, 6], 6) == 6


@pytest.mark.fault(11)
@pytest.mark.parametrize("name", SHARING)
def test_looking_for_a_prefix_splits_no_node(name: str) -> None:
    tree = tree_of(name)
    tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
    assert tree.match([1, 2, 9, 9], 4) == 2
    assert [(node.tokens, node.pages) for node in tree.nodes()] == [([1, 2, 3, 4, 5, 6], [0, 1, 2])]
    tree.check()


@pytest.mark.fault(13)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", SHARING)
def test_of_a_prompt_that_is_cached_whole_one_page_at_most_is_computed(name: str, page_size: int) -> None:
    """One token has to be computed for its logits; what is shared are whole pages, so that it is the last page."""
    rig = Rig(chapter(name), page_size=page_size)
    for rid in range(2):
        rig.add(Job(rid, own_prompt(7, 16), max_tokens=3, salt=rid))
        first = rig.run()[0]
        assert first == {rid: page_size if rid else 16}
    assert rig.cached == {0: 0, 1: 16 - page_size}
    rig.check_idle()


@pytest.mark.fault(16)
@pytest.mark.parametrize("name", SHARING)
def test_a_page_that_was_evicted_and_written_anew_is_found_by_its_old_tokens_no_more(name: str) -> None:
    """Three prompts of the whole pool, one after the other; the third is the first again."""
    rig = Rig(chapter(name), capacity=16, page_size=4)
    for rid, prompt in enumerate((own_prompt(1, 15), own_prompt(2, 15), own_prompt(1, 15))):
        rig.add(Job(rid, prompt, max_tokens=1))
        assert rig.run() == [{rid: 15}]
    assert set(rig.cached.values()) == {0}
    rig.check_idle()


@pytest.mark.fault(14)
@pytest.mark.parametrize("name", SHARING)
def test_a_preempted_request_that_finds_its_prefix_again_goes_on_with_the_right_tokens(name: str) -> None:
    module = chapter(name)
    prompts = [[7, *range(20 + i, 36 + i)] for i in range(3)]
    with tiny(module, kv_memory=memory(module, 48), page_size=4) as llm:
        outputs = run(llm, prompts, module.SamplingParams(max_tokens=20, ignore_eos=True))
        assert llm.stats()["preemptions"] > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 20
        assert_greedy(cached_tiny_model("llama"), prompt, output.token_ids)


# ---- work that grows where it should not


class Watched(list):
    """A list that counts how many of its items anybody looks at or copies."""

    looks = 0

    def __add__(self, other: Any) -> Any:
        Watched.looks += len(self)
        return super().__add__(other)

    def copy(self) -> Any:
        Watched.looks += len(self)
        return super().copy()

    def __iter__(self) -> Iterator[int]:
        Watched.looks += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        Watched.looks += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)


@pytest.mark.fault(26)
@pytest.mark.parametrize("name", CACHING)
def test_a_decode_step_does_not_look_at_the_whole_history(name: str) -> None:
    module = chapter(name)
    with tiny(module) as llm:
        llm.add([5] * 400, module.SamplingParams(max_tokens=40, ignore_eos=True))
        llm.step()
        [req] = llm.engine.scheduler.running
        while req.state.name != "DECODE":
            llm.step()
        req.token_ids = Watched(req.token_ids)
        Watched.looks = 0
        for _ in range(20):
            llm.step()
        assert 20 <= Watched.looks <= 20 * 40, "a few tokens a step, of more than 400"


@pytest.mark.fault(26)
@pytest.mark.parametrize("name", SHARING)
def test_eviction_touches_only_what_it_evicts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 prefixes; each page that is taken costs a few operations on the heap and no walk."""
    radix = part(chapter(name), "radix")
    tree, count = tree_of(name, 1), 0

    def counted(operation: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal count
            count += 1
            return operation(*args)

        return call

    for i in range(300):
        tree.insert([i, 1, 2], [3 * i, 3 * i + 1, 3 * i + 2])
    monkeypatch.setattr(
        radix, "heapq", SimpleNamespace(**{n: counted(getattr(radix.heapq, n)) for n in ("heappush", "heappop")})
    )
    monkeypatch.setattr(radix.RadixTree, "nodes", lambda self: pytest.fail("eviction walks the tree"))
    freed = [page for _ in range(30) for page in tree.evict(1)]
    assert freed == [page for i in range(10) for page in (3 * i + 2, 3 * i + 1, 3 * i)]
    assert count <= 3 * len(freed)


# ---- guesses


GUESSED = [[11, 12, 13, 14] * 8, [5, 81, 640], [7, 8, 9] * 8, list(range(40, 70))]


@pytest.fixture(params=GUESSING)
def guessing(request: pytest.FixtureRequest) -> ModuleType:
    """Every chapter that verifies guesses, in turn."""
    return chapter(request.param)


class Prophet:
    """Guesses what the engine answers without guesses, and now and then something else in the middle of it."""

    cost = 0.0

    def __init__(self, module: ModuleType, wrong: float) -> None:
        self.guess, self.wrong, self.rng = part(module, "speculative").Guess, wrong, random.Random(4)
        with tiny(module) as llm:
            outputs = run(llm, GUESSED, module.SamplingParams(max_tokens=60, ignore_eos=True))
        self.answers = {tuple(output.prompt_token_ids): output.token_ids for output in outputs}

    def propose(self, wanted: Any) -> list[Any]:
        return [self.guess(self._tokens(req, count)) for req, count in wanted]

    def release(self, req: Any) -> None: ...

    def flush(self) -> None: ...

    def _tokens(self, req: Any, count: int) -> list[int]:
        answer = self.answers[tuple(req.token_ids[: req.prompt_len])]
        return [(t + (self.rng.random() < self.wrong)) % 1003 for t in answer[req.output_len :][:count]]


def foretold(module: ModuleType, wrong: float, **options: Any) -> tuple[Any, dict[tuple[int, ...], list[int]]]:
    """An LLM whose guesses are a prophet's, and the greedy answers of one without."""
    prophet = Prophet(module, wrong)
    llm = tiny(module, speculative="ngram", **options)
    llm.engine.scheduler.speculator.proposer = prophet
    return llm, prophet.answers


@pytest.mark.fault(18)
@pytest.mark.parametrize("page_size", [1, 4])
def test_rejected_guesses_change_no_token_and_stay_out_of_the_prefix_cache(
    guessing: ModuleType, page_size: int
) -> None:
    """Then prompt and answer as a prompt, which begins with the pages that the first round left."""
    llm, answers = foretold(guessing, 0.2, page_size=page_size)
    with llm:
        outputs = run(llm, GUESSED, guessing.SamplingParams(max_tokens=40, ignore_eos=True))
        assert [output.token_ids for output in outputs] == [answers[tuple(prompt)][:40] for prompt in GUESSED]
        stats = llm.stats()
        assert stats["draft_tokens"] > stats["accepted_tokens"] > 40 and stats["kv_used"] == 0
        llm.engine.scheduler.speculator = None
        longer = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        again = run(llm, longer, guessing.SamplingParams(max_tokens=8, ignore_eos=True))
        assert llm.stats()["prefix_hit_tokens"] >= sum(map(len, longer)) - len(longer) * page_size - 4
    for prompt, output in zip(longer, again, strict=True):
        assert_greedy(cached_tiny_model("llama"), prompt, output.token_ids)


@pytest.mark.fault(18)
def test_an_accepted_run_ends_at_a_stop_token_and_at_max_tokens(guessing: ModuleType) -> None:
    make, prompt = guessing.SamplingParams, GUESSED[0]
    llm, answers = foretold(guessing, 0.0)
    want = answers[tuple(prompt)]
    with llm:
        for count in range(1, 12):
            [output] = run(llm, [prompt], make(max_tokens=count, ignore_eos=True))
            assert (output.token_ids, output.finish_reason) == (want[:count], "length")
        for token in want[2:12]:
            [output] = run(llm, [prompt], make(max_tokens=60, stop_token_ids=(token,), ignore_eos=True))
            assert (output.token_ids, output.finish_reason) == (want[: want.index(token) + 1], "stop")
        assert llm.stats()["accepted_tokens"] > 20


@pytest.mark.fault(18)
def test_samples_beside_guesses_follow_their_seed(guessing: ModuleType) -> None:
    def sampled(seed: int) -> list[int]:
        llm, _ = foretold(guessing, 0.2)
        with llm:
            params = guessing.SamplingParams(max_tokens=30, temperature=0.7, seed=seed, ignore_eos=True)
            return run(llm, GUESSED[:1], params)[0].token_ids

    assert sampled(3) == sampled(3) != sampled(4)
