"""Drafts in the scheduler, without a model: budget, pool, rollback, prefix cache, and random loads of all that can happen."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.conftest import chapter
from tests.scheduling import VOCAB, Job, Rig
from tests.speculation import SPECULATIVE, Prophet, speculator_of
from tests.test_scheduler_random import draw


@pytest.fixture(params=SPECULATIVE)
def module(request):
    """Every chapter that speculates, in turn."""
    return chapter(request.param)


def rig_of(module, seed: int = 0, wrong: float = 0.0, most: int = 4, **options) -> Rig:
    """A rig whose drafts are right but for a share of wrong tokens, and, with wrong 0, as long as allowed."""
    prophet = Prophet(lambda req: rig.jobs[req.rid].expected()[0], seed, wrong, VOCAB)
    if wrong == 0:
        prophet._draft = lambda req, count: list(prophet.future(req)[req.output_len :][:count])
    rig = Rig(module, speculator=speculator_of(module, prophet, most), **options)
    return rig


def drafted(rig: Rig) -> tuple[int, int]:
    return rig.scheduler.draft_tokens, rig.scheduler.accepted_tokens


# ---- one request


def test_right_guesses_are_taken_and_one_more_comes_with_them(module):
    """12 tokens: the first from the prompt, then 4 + 1, 4 + 1, and the last alone, for there is nothing to guess."""
    rig = rig_of(module)
    rig.submit(0, 3, 12)
    assert rig.run() == [{0: 3}, {0: 5}, {0: 5}, {0: 1}]
    assert drafted(rig) == (8, 8)
    rig.check_idle()


def test_wrong_guesses_cost_rows_and_change_nothing(module):
    rig = rig_of(module, wrong=1.0)
    rig.scheduler.speculator.proposer._draft = lambda req, count: (
        [(rig.jobs[0].expected()[0][req.output_len] + 1) % VOCAB] * count
    )
    rig.submit(0, 3, 5)
    assert rig.run() == [{0: 3}, {0: 4}, {0: 3}, {0: 2}, {0: 1}], "no guess beyond max_tokens"
    assert drafted(rig) == (6, 0)
    rig.check_idle()


def test_no_guess_without_room_for_it(module):
    """A budget of 3: one token for itself, two for the draft."""
    rig = rig_of(module, budget=3)
    rig.submit(0, 3, 7)
    assert rig.run() == [{0: 3}, {0: 3}, {0: 3}]


def test_prefill_chunks_come_before_guesses_and_guesses_share_what_is_left(module):
    """Two decode, one computes a prompt of 20 in chunks: nothing is left to guess with until it is through."""
    rig = rig_of(module, budget=12)
    rig.submit(0, 4, 30)
    rig.submit(1, 4, 30)
    rig.step()
    rig.submit(2, 20, 30)
    assert rig.step() == {0: 1, 1: 1, 2: 10}
    assert rig.step() == {0: 1, 1: 1, 2: 10}
    assert rig.step() == {0: 4, 1: 4, 2: 4}
    rig.run()
    rig.check_idle()


# ---- memory


def test_rejected_pages_go_back_at_once(module):
    """Pages of 2: the prompt has two, a draft of 4 takes three more, and a step later they are free again."""
    rig = rig_of(module, page_size=2, capacity=40, prefix_cache=False)
    right = rig.submit(0, 3, 20)
    future = rig.jobs[0].expected()[0]
    rig.step()
    rig.scheduler.speculator.proposer._draft = lambda req, count: [future[1], *[(t + 1) % VOCAB for t in future[2:5]]]
    free = rig.kv.ledger()["free"]
    assert rig.step() == {0: 5}
    assert right.length == 6 and right.cached_len == 5 and len(right.pages) == 3
    assert rig.kv.ledger()["free"] == free - 1
    assert drafted(rig) == (4, 1)


def test_a_draft_is_cut_to_the_pool_and_nobody_is_preempted_for_it(module):
    """Six pages of 2 for two requests of 5 + 1 tokens: each has three, and a guess would need a fourth."""
    rig = rig_of(module, page_size=2, capacity=12, prefix_cache=False)
    rig.submit(0, 5, 8)
    rig.submit(1, 5, 2)
    rig.step()
    assert rig.step() == {0: 1, 1: 1}, "position 5 has a place, position 6 has none"
    assert rig.scheduler.preemptions == 0
    assert rig.step() == {0: 5}, "the other one has ended"
    rig.run()
    rig.check_idle()


def test_nothing_rejected_enters_the_tree(module):
    """A request that ends in the middle of a draft leaves its own tokens behind, and no others."""
    rig = rig_of(module, page_size=1, most=6)
    job = Job(0, [24, 3, 5], 20, ignore_eos=True)
    job.stop_token_ids = (job.expected()[0][4],)
    output, reason = job.expected()
    rig.scheduler.speculator.proposer._draft = lambda req, count: (output[req.output_len :] + [1] * count)[:count]
    rig.add(job)
    rig.run()
    assert reason == "stop" and rig.output[0] == output
    assert rig.scheduler.draft_tokens > rig.scheduler.accepted_tokens
    cached = [token for node in rig.kv.tree.nodes() for token in node.tokens]
    assert cached == (job.prompt + output)[:-1], "the last token has no keys that anybody may use"


# ---- everything at once


def play(module, seed: int) -> Rig:
    load, rng = draw(seed), random.Random(seed)
    rig = rig_of(
        module,
        seed,
        wrong=rng.choice((0.05, 0.3, 0.9)),
        most=rng.choice((1, 3, 8)),
        max_running=load.max_running,
        budget=load.budget,
        capacity=load.capacity,
        page_size=load.page_size,
        static=load.static,
        prefix_cache=load.prefix_cache,
    )
    coming = sorted(load.jobs, key=lambda job: job.arrives)
    aborts = sorted((step, job.rid) for job in load.jobs for step in job.aborts)
    while coming or rig.reqs or aborts:
        assert rig.now < 5000, "requests are not done"
        while coming and coming[0].arrives <= rig.now:
            rig.add(coming.pop(0))
        while aborts and aborts[0][0] <= rig.now:
            rig.abort(aborts.pop(0)[1])
        if rig.now in load.flushes:
            rig.kv.flush()
        rig.step()
    rig.check_idle()
    released = rig.scheduler.speculator.proposer.released
    assert set(released) == rig.jobs.keys(), "the proposer is told of every end"
    assert len(released) == len(rig.jobs) + rig.scheduler.preemptions, "and of every preemption"
    return rig


def play_block(module, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            rig = play(module, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(rig.ends.values())
        seen["preemptions"] += rig.scheduler.preemptions
        seen["hits"] += rig.scheduler.hit_tokens
        seen["drafted"] += rig.scheduler.draft_tokens
        seen["accepted"] += rig.scheduler.accepted_tokens
    return seen


def test_sixty_random_loads_with_guesses_that_are_right_and_wrong(module):
    seen = play_block(module, range(60))
    for what in ("stop", "length", "abort", "preemptions"):
        assert seen[what] > 50, f"{what}: {seen}"
    assert 500 < seen["accepted"] < 0.9 * seen["drafted"] and seen["hits"] > 500


@pytest.mark.full
@pytest.mark.parametrize("block", range(50))
def test_a_thousand_random_loads_with_guesses(module, block):
    play_block(module, range(block * 20, (block + 1) * 20))
