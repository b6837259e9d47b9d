"""The scheduler under random load, without a model: after every step every invariant holds, and nothing starves.

Arrivals, aborts, ends, budgets and pools are drawn from a seed; tests.scheduling.Rig checks each step.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.scheduling import VOCAB, Job, Rig, has_option

SEEDS, BLOCK = 1000, 20


@dataclass
class Load:
    """What one seed draws."""

    max_running: int
    budget: int
    capacity: int
    page_size: int
    static: bool
    prefix_cache: bool
    jobs: list[Job]
    flushes: list[int]  # steps


def draw(seed: int) -> Load:
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4, 16))
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    count, spread = rng.randint(2, 24), rng.choice((0, 10, 60))
    jobs = [draw_job(rng, rid, prefixes, spread) for rid in range(count)]
    # Between what the longest request needs alone and plenty, mostly little: then requests are thrown out.
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    capacity = (-(-longest // page_size) + rng.choice((0, 0, 1, 3, 200))) * page_size
    return Load(
        max_running=rng.choice((1, 2, 4, 8, 32)),
        budget=rng.choice((1, 2, 4, 9, 16, 40, 100)),
        capacity=capacity,
        page_size=page_size,
        static=rng.random() < 0.2,
        prefix_cache=rng.random() < 0.8,
        jobs=jobs,
        flushes=[step for step in range(100) if rng.random() < 0.02],
    )


def draw_job(rng: random.Random, rid: int, prefixes: list[list[int]], spread: int) -> Job:
    shared = rng.choice(prefixes)[: rng.randint(0, 30)] if rng.random() < 0.7 else []
    prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randint(0 if shared else 1, 6))]
    arrives = rng.randint(0, spread)
    aborts = [arrives + rng.randint(-3, 25) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    return Job(
        rid,
        prompt,
        max_tokens=rng.choice((1, 2, 6, 15, 40)),
        arrives=arrives,
        aborts=aborts,
        salt=rng.choice((0, rid)),  # 0: greedy, so that equal prompts go on alike
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
    )


def play(chapter, seed: int) -> Rig:
    """Run a seed to its end. A request is done at the latest so many steps after it became the oldest as it has tokens."""
    load = draw(seed)
    capacity = load.capacity if has_option(chapter, "page_size") else 80
    rig = Rig(
        chapter,
        max_running=load.max_running,
        budget=load.budget,
        capacity=capacity,
        page_size=load.page_size,
        static=load.static,
        prefix_cache=load.prefix_cache,
    )
    coming = sorted(load.jobs, key=lambda job: job.arrives)
    aborts = sorted((step, job.rid) for job in load.jobs for step in job.aborts)
    most = max(job.arrives for job in load.jobs) + sum(len(job.prompt) + job.max_tokens for job in load.jobs)
    while coming or rig.reqs or aborts:
        assert rig.now <= most + 100, f"seed {seed}: {sorted(rig.reqs)} are not done after {rig.now} steps"
        while coming and coming[0].arrives <= rig.now:
            rig.add(coming.pop(0))
        while aborts and aborts[0][0] <= rig.now:
            rig.abort(aborts.pop(0)[1])
        if rig.now in load.flushes and hasattr(rig.kv, "flush"):
            rig.kv.flush()
            rig.check()
        rig.step()
    rig.check_idle()
    return rig


def play_block(chapter, seeds: range) -> Counter[str]:
    """What happened in all of these seeds together."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            rig = play(chapter, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(rig.ends.values())
        seen.update(rig.phases)
        seen["preemptions"] += getattr(rig.scheduler, "preemptions", 0)
        seen["hits"] += getattr(rig.scheduler, "hit_tokens", 0)
    return seen


@pytest.mark.fault(3, 6)
def test_sixty_random_loads_meet_everything_that_can_happen(batching_chapter):
    """Else the test below might be green because it tests nothing."""
    seen = play_block(batching_chapter, range(60))
    for what in ("stop", "length", "abort", "prefill", "decode", "mixed"):
        assert seen[what] > 50, f"{what}: {seen}"
    if has_option(batching_chapter, "page_size"):
        assert seen["preemptions"] > 50
    if has_option(batching_chapter, "prefix_cache"):
        assert seen["hits"] > 500


@pytest.mark.full
@pytest.mark.parametrize("block", range(SEEDS // BLOCK))
def test_a_thousand_random_loads(batching_chapter, block):
    play_block(batching_chapter, range(block * BLOCK, (block + 1) * BLOCK))
