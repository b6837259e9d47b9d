"""What sharing saves, counted on the workloads of the benchmark: how many tokens are left to compute."""

from __future__ import annotations

from types import ModuleType

import pytest

from common.engines import open_engine
from common.harness import RunResult
from common.tiny import cached_tiny_model
from common.worker import drive
from common.workloads import Workload, get

VOCAB, PAGE = 1003, 16


def run(module: ModuleType, workload: Workload, **options: object) -> RunResult:
    """A fresh engine of the tiny model, with a context that is long enough."""
    folder = str(cached_tiny_model("llama", max_position_embeddings=2048))
    options = {"model": folder, "dtype": "float32", "threads": 1, "page_size": PAGE, **options}
    engine = open_engine(module.__name__, options)
    try:
        return drive(engine, workload)
    finally:
        engine.close()


@pytest.mark.parametrize("budget", (2048, 4096))
def test_32_requests_that_share_512_of_544_tokens_compute_1536(sharing_chapter, budget):
    result = run(sharing_chapter, get("shared_prefix", VOCAB), max_batch_tokens=budget)
    assert result.counters["prefill_tokens"] == 544 + 31 * 32 == 1536
    assert result.counters["prefix_hit_tokens"] == 31 * 512
    assert [request.cached_tokens for request in result.requests] == [0] + [512] * 31


def test_without_the_prefix_cache_they_compute_17408(sharing_chapter):
    result = run(sharing_chapter, get("shared_prefix", VOCAB), max_batch_tokens=2048, prefix_cache=False)
    assert result.counters["prefill_tokens"] == 32 * 544 == 17_408
    assert result.counters["prefix_hit_tokens"] == 0 == sum(request.cached_tokens for request in result.requests)


def test_small_steps_compute_no_more(sharing_chapter):
    result = run(sharing_chapter, get("shared_prefix", VOCAB), max_batch_tokens=100)
    assert result.counters["prefill_tokens"] == 1536


def test_each_turn_of_a_conversation_prefills_the_new_text_only(sharing_chapter):
    """Left over of the history: the answer's last token, which nobody has computed, and what does not fill a page."""
    workload = get("multi_turn", VOCAB)
    result = run(sharing_chapter, workload)
    requests = iter(result.requests)
    for talk in workload.conversations:
        computed = len(talk.system_ids) if talk is workload.conversations[0] else 0
        for at, (turn, length) in enumerate(zip(talk.turns, talk.prompt_lengths(), strict=True)):
            request = next(requests)
            assert request.prompt_tokens == length
            text = len(turn.user_ids) + (computed if at == 0 else 1)
            assert text <= length - request.cached_tokens <= text + PAGE - 1, f"turn {at}"
    left = sum(request.prompt_tokens - request.cached_tokens for request in result.requests)
    assert left == result.counters["prefill_tokens"], "nothing is computed twice"


def test_the_hit_tokens_are_those_of_the_requests_whatever_is_preempted(sharing_chapter):
    """A pool for two of the requests at a time: what they find of their own after a preemption is not counted."""
    workload = get("offline", VOCAB, scale=0.2, length_scale=0.5)
    token = 2 * 3 * 2 * 16 * 4
    result = run(sharing_chapter, workload, kv_memory=str(14 * PAGE * token), max_running=8)
    assert result.counters["preemptions"] > 0
    assert result.counters["prefix_hit_tokens"] == 0 == sum(request.cached_tokens for request in result.requests)
    assert result.counters["prefill_tokens"] > workload.prompt_tokens
