"""transformers as a peer: exact counts and real token times, whatever way it batches."""

import pytest

from common import engines, worker
from common.workloads import Request, Workload

PROMPTS = ((9, 10, 11, 12, 13), (20, 21), (30, 31, 32))
LENGTHS = (6, 1, 3)
WORK = Workload("three", tuple(Request(p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)), "")
MODEL = "dummy:llama-tiny"


def run(**options):
    engine = engines.open_hf(MODEL, "float32", 1, **options)
    try:
        return worker.drive(engine, WORK)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def one_by_one():
    return run(batch=1)


def test_each_request_gets_its_own_number_of_tokens_and_real_times(one_by_one):
    assert [len(r.token_ids) for r in one_by_one.requests] == list(LENGTHS)
    assert one_by_one.output_tokens == sum(LENGTHS)
    first, second, third = (r.ttft_s for r in one_by_one.requests)
    assert 0 < first < second < third  # each waits for those before it
    assert all(gap > 0 for r in one_by_one.requests for gap in r.itl_s)


def test_a_static_batch_gives_the_tokens_of_single_runs_and_ends_for_all_at_once(one_by_one):
    batched = run(batch=16)
    assert [r.token_ids for r in batched.requests] == [r.token_ids for r in one_by_one.requests]
    assert len({round(r.e2e_s, 6) for r in batched.requests}) == 1
    assert "static batches of 16" in batched.method


@pytest.mark.full  # its cache takes a share of all free memory
def test_continuous_batching_gives_the_tokens_of_single_runs(one_by_one):
    assert [r.token_ids for r in run(continuous=True).requests] == [r.token_ids for r in one_by_one.requests]


def test_bad_options_are_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="dtype must be auto, float32 or bfloat16, not 'int8'"):
        engines.open_hf("no such model", "int8")
    with pytest.raises(ValueError, match="batch must be at least 1"):
        engines.open_hf("no such model", batch=16, continuous=True)
