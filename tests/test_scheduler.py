"""The scheduler by itself, without a model: who gets how many tokens in which step, and what no load may break."""

from __future__ import annotations

import heapq
import random

import pytest

from common.tiny import cached_tiny_model
from tests.scheduling import EOS, Job, Rig, own_prompt

OUTPUTS = (3, 8, 2, 10, 4, 6, 5, 7)  # tokens of eight requests, for four places


# ---- counters: eight requests, four places


def static_steps(outputs, places):
    """Each batch lasts as long as its longest request."""
    return sum(max(outputs[at : at + places]) for at in range(0, len(outputs), places))


def continuous_steps(outputs, places):
    """A place that becomes free is taken in the next step by the first that waits."""
    ends = [0] * places
    for count in outputs:
        heapq.heappush(ends, heapq.heappop(ends) + count)
    return max(ends)


def test_what_the_counters_must_be():
    assert sum(OUTPUTS) == 45
    assert static_steps(OUTPUTS, 4) == max(3, 8, 2, 10) + max(4, 6, 5, 7) == 17
    assert continuous_steps(OUTPUTS, 4) == 15
    assert round(100 * 45 / (17 * 4), 1) == 66.2 and 100 * 45 / (15 * 4) == 75.0


MODES = {  # mode: steps, rows, occupancy in percent
    "sequential": (45, 1, 100.0),
    "static": (17, 4, 66.2),
    "continuous": (15, 4, 75.0),
}


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_occupancy_of_the_three_modes(batching_chapter, mode):
    steps, rows, occupancy = MODES[mode]
    rig = Rig(batching_chapter, max_running=rows, static=mode == "static")
    for rid, count in enumerate(OUTPUTS):
        rig.submit(rid, 4 + rid, count)
    done = rig.run()
    assert len(done) == steps
    assert round(100 * sum(OUTPUTS) / (len(done) * rows), 1) == occupancy
    assert sum(map(len, done)) == sum(OUTPUTS), "every row of every step gave a token"
    rig.check_idle()


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_counts_the_same_steps(batching_chapter, mode):
    steps, rows, _ = MODES[mode]
    options = {"max_running": rows, "max_batch_tokens": 64, "scheduler": "static" if mode == "static" else "continuous"}
    folder = str(cached_tiny_model("llama"))
    params = [batching_chapter.SamplingParams(max_tokens=count, ignore_eos=True) for count in OUTPUTS]
    prompts = [own_prompt(rid, 4 + rid) for rid in range(8)]
    with batching_chapter.LLM(folder, dtype="float32", threads=1, debug_invariants=True, **options) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        stats = llm.stats()
    assert [len(output.token_ids) for output in outputs] == list(OUTPUTS)
    assert stats["steps"] == steps
    assert stats["prefill_tokens"] == sum(map(len, prompts))
    assert stats["decode_tokens"] == sum(OUTPUTS) - 8
    assert stats["running"] == stats["waiting"] == stats["kv_used"] == 0


def test_who_runs_in_each_step_of_the_continuous_mode(batching_chapter):
    rig = Rig(batching_chapter, max_running=4)
    for rid, count in enumerate(OUTPUTS):
        rig.submit(rid, 1, count)
    rows = [list(step) for step in rig.run()]
    assert rows == [
        *[[0, 1, 2, 3]] * 2,
        [0, 1, 3, 4],  # 2 gave its second token and left; 4 is there in the next step
        *[[1, 3, 4, 5]] * 3,  # 0 left after its third
        *[[1, 3, 5, 6]] * 2,
        *[[3, 5, 6, 7]] * 1,
        *[[3, 6, 7]] * 1,
        *[[6, 7]] * 1,
        *[[7]] * 4,
    ]


# ---- the token budget


@pytest.mark.fault(15)
def test_a_long_prompt_is_cut_by_the_budget(batching_chapter):
    rig = Rig(batching_chapter, budget=8)
    rig.submit(0, 20, 3)
    assert rig.run() == [{0: 8}, {0: 8}, {0: 4}, {0: 1}, {0: 1}]
    assert rig.phases == ["prefill", "prefill", "prefill", "decode", "decode"]
    rig.check_idle()


@pytest.mark.fault(15)
def test_no_token_is_sampled_from_a_chunk_that_is_not_the_last(batching_chapter):
    rig = Rig(batching_chapter, budget=8)
    rig.submit(0, 17, 2)
    for outputs in (0, 0, 1, 2):
        rig.step()
        assert len(rig.output[0]) == outputs


def test_decoding_comes_first_and_prefill_takes_the_rest(batching_chapter):
    rig = Rig(batching_chapter, budget=5)
    rig.submit(0, 3, 6)
    assert rig.step() == {0: 3}
    rig.submit(1, 10, 2)
    assert rig.run() == [{0: 1, 1: 4}, {0: 1, 1: 4}, {0: 1, 1: 2}, {0: 1, 1: 1}, {0: 1}]
    assert rig.phases == ["prefill", "mixed", "mixed", "mixed", "decode", "decode"]


def test_what_one_prompt_leaves_of_the_budget_goes_to_the_next(batching_chapter):
    rig = Rig(batching_chapter, budget=8)
    for rid, length in enumerate((3, 4, 6)):
        rig.submit(rid, length, 2)
    assert rig.run() == [{0: 3, 1: 4, 2: 1}, {0: 1, 1: 1, 2: 5}, {2: 1}]


@pytest.mark.fault(21)
def test_a_prefill_behind_another_one_still_advances(batching_chapter):
    """The first prompt has taken the step; the second, admitted in the step before, gets its one token."""
    rig = Rig(batching_chapter, budget=4)
    rig.submit(0, 3, 2)
    rig.submit(1, 9, 1)
    rig.submit(2, 9, 1)
    assert rig.run() == [{0: 3, 1: 1}, {0: 1, 1: 3}, {1: 4}, {1: 1, 2: 3}, {2: 4}, {2: 2}]


def test_a_budget_of_one_runs_one_request_token_by_token(batching_chapter):
    rig = Rig(batching_chapter, max_running=8, budget=1)
    rig.submit(0, 3, 2)
    rig.submit(1, 2, 1)
    assert rig.run() == [{0: 1}, {0: 1}, {0: 1}, {0: 1}, {1: 1}, {1: 1}]
    rig.check_idle()


@pytest.mark.fault(21)
@pytest.mark.parametrize(("max_running", "budget"), [(3, 64), (64, 3), (3, 3), (1, 64), (64, 1)])
def test_the_running_set_never_outgrows_max_running_and_the_budget(batching_chapter, max_running, budget):
    rig = Rig(batching_chapter, max_running=max_running, budget=budget, capacity=2048)
    for rid in range(10):
        rig.submit(rid, 1, 5)
    most = max(len(step) for step in rig.run())
    assert most == min(max_running, budget)
    assert rig.scheduler.max_running == most


@pytest.mark.fault(24)
def test_a_decode_waits_for_no_prompt_however_many_arrive(batching_chapter):
    """Prompts in every step, more than the budget takes: the one that decodes has its token in each (no gap of 20)."""
    rig = Rig(batching_chapter, budget=4, max_running=4)
    rig.submit(0, 2, 40)
    rig.step()
    for rid in range(1, 40):
        rig.submit(rid, 30, 2)
        assert rig.step()[0] == 1
    assert rig.ends[0] == "length" and len(rig.ends) < 5, "the prompts went on with three tokens a step"


@pytest.mark.fault(2)
def test_nothing_is_taken_of_a_run_of_tokens_after_its_end(batching_chapter):
    """A step may give several tokens at once; what follows EOS or the last token wanted is dropped."""
    for tokens, wanted, reason in (([5, EOS, 7], [5, EOS], "stop"), ([5, 6, 7], [5, 6], "length")):
        rig = Rig(batching_chapter)
        rig.add(Job(0, own_prompt(0, 3), max_tokens=2, ignore_eos=False))
        batch = rig.scheduler.schedule()
        [out] = rig.scheduler.process(batch, [tokens], [[{"token_id": token} for token in tokens]])
        assert (out.ids, out.finish.reason) == (wanted, reason)
        assert [entry["token_id"] for entry in out.logprobs] == wanted


# ---- first come, first served


def test_requests_start_in_the_order_they_came(batching_chapter):
    rig = Rig(batching_chapter, max_running=3, budget=6)
    rng = random.Random(4)
    for rid in range(20):
        rig.submit(rid, rng.randint(1, 15), rng.randint(1, 6))
    starts = [rid for step in rig.run() for rid in step]
    assert list(dict.fromkeys(starts)) == list(range(20))


def test_a_freed_place_is_taken_in_the_next_step(batching_chapter):
    rig = Rig(batching_chapter, max_running=1)
    rig.submit(0, 5, 1)
    rig.submit(1, 5, 1)
    assert rig.run() == [{0: 5}, {1: 5}]


def test_one_that_comes_later_joins_the_next_step(batching_chapter):
    rig = Rig(batching_chapter)
    rig.submit(0, 5, 3)
    rig.step()
    rig.submit(1, 5, 1)
    assert rig.step() == {0: 1, 1: 5}


# ---- static batches


def test_a_static_batch_lets_nobody_in_before_it_has_ended(batching_chapter):
    rig = Rig(batching_chapter, max_running=4, static=True)
    rig.submit(0, 2, 3)
    rig.submit(1, 2, 1)
    rig.step()
    rig.submit(2, 2, 1)
    assert rig.run() == [{0: 1}, {0: 1}, {2: 2}]


def test_a_static_batch_is_filled_over_several_steps_where_the_budget_is_small(batching_chapter):
    """Else the budget, and not max_running, would say how many requests a batch has."""
    rig = Rig(batching_chapter, max_running=3, budget=8, static=True)
    for rid in range(5):
        rig.submit(rid, 6, 4)
    steps = rig.run()
    assert [list(step) for step in steps[:3]] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    first = [step for step in steps if 0 in step or 1 in step or 2 in step]
    assert all(rid < 3 for step in first for rid in step) and steps[len(first)].keys() == {3, 4}
    rig.check_idle()


# ---- aborts


@pytest.mark.fault(6)
def test_aborts_at_every_stage_of_a_life(batching_chapter):
    rig = Rig(batching_chapter, max_running=2, budget=4)
    for rid in range(4):
        rig.submit(rid, 6, 5)
    rig.abort(3)  # waits
    rig.step()
    rig.abort(0)  # in the middle of its prompt
    assert rig.ends == {3: "abort", 0: "abort"} and not rig.output[0]
    rig.step()
    rig.step()
    rig.abort(1)  # decodes
    assert rig.output[1] and rig.ends[1] == "abort"
    for rid in (0, 1, 3, 77):
        rig.abort(rid)  # over, or never there
    rig.run()
    assert rig.ends[2] == "length" and len(rig.output[2]) == 5
    assert rig.kv.ledger()["owned"] == 0


def test_an_abort_frees_its_place_for_the_next_step(batching_chapter):
    rig = Rig(batching_chapter, max_running=1)
    rig.submit(0, 5, 9)
    rig.submit(1, 5, 9)
    rig.step()
    rig.abort(0)
    assert rig.step() == {1: 5}


def test_an_abort_of_everything_leaves_nothing_to_do(batching_chapter):
    rig = Rig(batching_chapter)
    for rid in range(3):
        rig.submit(rid, 5, 9)
    rig.step()
    for rid in range(3):
        rig.abort(rid)
    assert rig.step() == {} and rig.scheduler.schedule() is None
