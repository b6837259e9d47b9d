"""Whole engines with a pool that checks every attention read: equal prefixes, memory for about one request, aborts, chunks.

Each seed draws an engine and its load. Faults that were made on purpose show that the checks find what they are for.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from common.tiny import cached_tiny_model
from tests.checking import CheckingPool
from tests.conftest import SHARING, chapter
from tests.oracle import assert_greedy
from tests.scheduling import part

SEEDS, BLOCK = 200, 20


@dataclass
class Load:
    """What one seed draws: options of the engine, requests by the step in which they come, steps with other events."""

    options: dict[str, Any]
    requests: list[tuple[int, list[int], int]]  # step, prompt, max_tokens
    aborts: list[tuple[int, int]]  # step, which request
    flushes: list[int] = field(default_factory=list)  # steps


def draw(module: ModuleType, seed: int) -> Load:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4, 8))
    prefixes = [[rng.randrange(4, 1003) for _ in range(rng.choice((4, 8, 17, 40)))] for _ in range(2)]
    requests = []
    for _ in range(rng.randint(6, 14)):
        shared = rng.choice(prefixes)
        prompt = shared[: rng.choice((len(shared), rng.randint(1, len(shared))))] if rng.random() < 0.8 else []
        prompt = prompt + [rng.choice((7, 8, 9)) for _ in range(rng.randint(0 if prompt else 1, 6))]
        requests.append((rng.randint(0, 25), prompt, rng.choice((1, 2, 5, 12, 20))))
    requests.sort(key=lambda request: request[0])
    longest = max(-(-(len(prompt) + count) // size) for _, prompt, count in requests)
    tokens = (longest + rng.choice((0, 1, 2, 4))) * size
    options = {
        "page_size": size,
        "kv_memory": str(tokens * part(module, "kvcache").token_bytes(3, 2, 16, torch.float32)),
        "max_batch_tokens": rng.choice((1, 3, 8, 16, 128)),
        "max_running": rng.choice((2, 4, 8)),
        "scheduler": rng.choice(("continuous", "continuous", "continuous", "static")),
    }
    aborts = [(rng.randint(0, 60), rng.randrange(len(requests))) for _ in range(rng.choice((1, 2, 5)))]
    return Load(options, requests, sorted(aborts), [step for step in range(80) if rng.random() < 0.02])


def play(module: ModuleType, seed: int, books: bool = True) -> Counter[str]:
    """Run a seed to its end; AssertionError if anything is not as it must be. Returns what happened.

    books False: the engine does not check its own.
    """
    load = draw(module, seed)
    folder = cached_tiny_model("llama")
    with module.LLM(str(folder), dtype="float32", threads=1, debug_invariants=books, **load.options) as llm:
        pool = CheckingPool(llm.engine)
        outputs = drive(module, llm, load)
        kv, stats = llm.engine.kv, llm.stats()
        assert stats["prefix_hit_tokens"] >= sum(output.cached_tokens for output in outputs)
        kv.tree.check()
        kv.flush()
        assert kv.ledger() == {"free": kv.num_pages, "cached": 0, "owned": 0, "total": kv.num_pages}
    compared = sum(assert_greedy(folder, o.prompt_token_ids, o.token_ids) for o in outputs[:3] if o.token_ids)
    seen = Counter(output.finish_reason for output in outputs)
    seen.update(reads=pool.reads, compared=compared, preemptions=stats["preemptions"], hits=stats["prefix_hit_tokens"])
    return seen


def drive(module: ModuleType, llm: Any, load: Load) -> list[Any]:
    """Step until nothing is left; the outputs in the order in which they came."""
    coming, aborts = list(load.requests), list(load.aborts)
    wanted: dict[int, int] = {}
    outputs: list[Any] = []
    most = sum(len(prompt) + count for _, prompt, count in coming) + 100
    for step in range(most):
        if not coming and not llm.has_work():
            break
        while coming and coming[0][0] <= step:
            _, prompt, count = coming.pop(0)
            wanted[llm.add(prompt, module.SamplingParams(max_tokens=count, ignore_eos=True))] = count
        while aborts and aborts[0][0] <= step:
            llm.abort(aborts.pop(0)[1])
        if step in load.flushes:
            llm.engine.kv.flush()
        outputs += llm.step()
    else:
        raise AssertionError(f"not done after {most} steps: a request starves")
    assert len(outputs) == len(wanted), "each request is answered once"
    lengths = Counter(len(output.token_ids) for output in outputs if output.finish_reason == "length")
    assert not lengths - Counter(wanted.values()), "exactly max_tokens tokens"
    return outputs


@pytest.mark.parametrize("seed", range(6))
def test_every_read_finds_the_keys_of_the_right_token_of_the_right_request(sharing_chapter, seed):
    play(sharing_chapter, seed)


def test_the_first_seeds_meet_everything_that_can_happen(sharing_chapter):
    """Else the tests of this file might be green because they test nothing."""
    seen: Counter[str] = Counter()
    for seed in range(100, 112):
        seen.update(play(sharing_chapter, seed))
    assert all(seen[what] > 5 for what in ("length", "abort", "preemptions")), seen
    assert seen["hits"] > 300 and seen["compared"] > 100 and seen["reads"] > 10_000, seen


@pytest.mark.full
@pytest.mark.parametrize("block", range(SEEDS // BLOCK))
def test_two_hundred_seeds(sharing_chapter, block):
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            play(sharing_chapter, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# ---- faults made on purpose


def forget_the_canonical_page(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a second computation are freed, and the request goes on reading them."""
    tree = part(module, "radix").RadixTree
    insert = tree.insert

    def plain(self: Any, tokens: Any, pages: Any) -> Any:
        return [(place, own, own) for place, own, _ in insert(self, tokens, pages)]

    monkeypatch.setattr(tree, "insert", plain)


def evict_what_is_locked(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a running request reads are given to another one."""
    tree = part(module, "radix").RadixTree
    monkeypatch.setattr(tree, "unlock", lambda self, node: None)
    monkeypatch.setattr(tree, "_add_lock", lambda self, node, change: self._offer(node))


def find_a_page_too_many(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is found by its first tokens alone."""
    tree = part(module, "radix").RadixTree
    monkeypatch.setattr(tree, "match", lambda self, tokens, limit: limit // self.page_size * self.page_size)
    lock = tree.lock

    def careless(self: Any, tokens: Any, limit: int) -> Any:
        node, pages = lock(self, tokens, limit)
        below = [child for child in node.children.values() if len(child.pages) == 1]
        fits = (len(pages) + 1) * self.page_size <= limit
        return node, pages + (below[0].pages if below and fits else [])

    monkeypatch.setattr(tree, "lock", careless)


def share_before_computing(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages enter the tree when their step is planned: whoever joins in that step reads what is not there."""
    scheduler = part(module, "scheduler").Scheduler
    take = scheduler._take

    def early(self: Any, req: Any, extend_len: int) -> Any:
        item = take(self, req, extend_len)
        req.cached_len += extend_len
        self.kv.commit(req)
        req.cached_len -= extend_len
        return item

    monkeypatch.setattr(scheduler, "_take", early)


@pytest.mark.parametrize(
    "plant", [forget_the_canonical_page, evict_what_is_locked, find_a_page_too_many, share_before_computing]
)
def test_a_planted_fault_is_found_within_forty_seeds(plant, monkeypatch):
    module = chapter(SHARING[0])
    plant(module, monkeypatch)
    with pytest.raises(AssertionError, match=r"positions that layer \d+ reads|a page that is free|is written"):
        for seed in range(40):
            play(module, seed, books=False)
