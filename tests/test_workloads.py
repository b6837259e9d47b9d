"""Workloads are data: equal for equal arguments in every process, with the lengths that their descriptions promise.

So the floors under a measurement, which follow from a workload, a model and a machine, are data too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common import host, workloads
from common.workloads import Conversation, Request, Turn, Workload

ROOT = Path(__file__).parent.parent
NAMES = tuple(workloads.BUILDERS)


def within(values, lo, hi):
    return min(values) >= lo and max(values) <= hi


@pytest.mark.parametrize("name", NAMES)
def test_equal_arguments_give_equal_workloads_and_another_seed_another(name):
    assert workloads.get(name, seed=3) == workloads.get(name, seed=3)
    if name != "edit":  # the texts of edit are fixed
        assert workloads.get(name, seed=3) != workloads.get(name, seed=4)


def test_a_workload_does_not_depend_on_the_hash_seed_of_the_process():
    code = "from common import workloads as w; import json; print(json.dumps([w.get(n).to_dict() for n in w.BUILDERS]))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {(json.dumps([workloads.get(name).to_dict() for name in NAMES]) + "\n").encode()}


def test_the_published_ids_stay_as_they_are():
    first = workloads.get("latency").requests[0].prompt_ids
    assert first[:4] == (30051, 13246, 3159, 18532)


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_measures_a_prefix_of_the_full_one(name):
    full, quick = workloads.get(name), workloads.get(name, scale=0.25)
    assert full.requests[: len(quick.requests)] == quick.requests
    assert full.conversations[: len(quick.conversations)] == quick.conversations
    assert quick.size == max(1, full.size // 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_survives_json(name):
    workload = workloads.get(name, scale=0.2)
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


def test_latency_is_one_request_of_128_in_and_128_out():
    (request,) = workloads.get("latency").requests
    assert (len(request.prompt_ids), request.max_tokens, request.arrival_s) == (128, 128, 0.0)


def test_offline_is_64_requests_at_once_that_use_the_whole_range_of_lengths():
    requests = workloads.get("offline").requests
    assert len(requests) == 64 and {r.arrival_s for r in requests} == {0.0}
    assert within([len(r.prompt_ids) for r in requests], 16, 256) and within([r.max_tokens for r in requests], 16, 128)
    assert max(len(r.prompt_ids) for r in requests) > 230 and max(r.max_tokens for r in requests) > 110


def test_shared_prefix_shares_512_tokens_and_no_more():
    workload = workloads.get("shared_prefix")
    assert workload.size == 32 and {r.max_tokens for r in workload.requests} == {16}
    assert {len(r.prompt_ids) for r in workload.requests} == {544}
    assert len({r.prompt_ids[:512] for r in workload.requests}) == 1
    assert len({r.prompt_ids[512:514] for r in workload.requests}) == 32
    assert workload.prompt_tokens == 32 * 544
    assert workload.distinct_prompt_tokens == pytest.approx(512 + 32 * 32, abs=3)


def test_online_arrives_at_about_two_requests_a_second_from_time_zero():
    requests = workloads.get("online").requests
    times = [r.arrival_s for r in requests]
    assert len(requests) == 40 and times[0] == 0.0 and times == sorted(times)
    assert 13 < times[-1] < 27
    assert within([len(r.prompt_ids) for r in requests], 64, 192) and within([r.max_tokens for r in requests], 32, 64)


def test_multi_turn_is_8_conversations_of_5_turns_that_fit_a_context_of_2048():
    workload = workloads.get("multi_turn")
    assert [len(c.turns) for c in workload.conversations] == [5] * 8 and workload.size == 40
    assert max(workload.prompt_lengths()) + 64 < 2048


def test_the_prompt_of_a_turn_is_the_history_with_the_answers_that_were_really_given():
    talk = Conversation((1, 2), (Turn((10,), 2), Turn((11,), 1), Turn((12, 13), 1)))
    answers = [(90, 91), (92,)]
    assert talk.prompt(0, []) == (1, 2, 10)
    assert talk.prompt(2, answers) == (1, 2, 10, 90, 91, 11, 92, 12, 13)
    assert talk.prompt_lengths() == [3, 6, 9]


def test_distinct_prompt_tokens_are_the_nodes_of_a_trie():
    requests = tuple(Request(ids, 1) for ids in ((1, 2, 3), (1, 2, 4, 5), (6,), (1, 2, 3)))
    assert Workload("w", requests, "").distinct_prompt_tokens == 6


def test_edit_asks_for_the_code_back_and_wants_no_more_tokens_than_the_code_can_have():
    workload = workloads.get("edit")
    assert workload.size == 8
    for request in workload.requests:
        code = request.text.split("```python\n")[1].removesuffix("```")
        compile(code, "snippet", "exec")
        assert 16 <= request.max_tokens < len(code) / 3
    with pytest.raises(ValueError, match="encode_texts"):
        _ = workload.prompt_tokens


@pytest.mark.parametrize("vocab", [16, 64, 320, 5000, 49152, 151936])
def test_ids_stay_clear_of_both_ends_of_a_vocabulary(vocab):
    lo, hi = workloads.id_range(vocab)
    ids = [i for r in workloads.get("offline", vocab, scale=0.3).requests for i in r.prompt_ids]
    assert lo > 0 and hi < vocab and within(ids, lo, hi - 1)
    assert (lo, hi) == (1000, 40000) or vocab < 49152


def test_length_scale_shortens_every_length_and_keeps_the_number_of_requests():
    short = workloads.get("offline", length_scale=0.25).requests
    assert len(short) == 64 and within([len(r.prompt_ids) for r in short], 4, 64)
    assert within([r.max_tokens for r in short], 4, 32)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"unknown workload 'nope', choose from latency, offline"):
        workloads.get("nope")
    for bad in ({"scale": 0}, {"scale": float("nan")}, {"length_scale": -1}):
        with pytest.raises(ValueError, match="must be positive"):
            workloads.get("latency", **bad)
    with pytest.raises(ValueError, match="too small"):
        workloads.get("latency", vocab_size=15)
    with pytest.raises(ValueError, match="either prompt_ids or text"):
        Request((1,), 1, text="x")
    with pytest.raises(ValueError, match="at least 1"):
        Request((1,), 0)


SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "model_type": "llama",
}  # fmt: skip


def test_weight_bytes_read_a_tied_table_once_and_leave_out_a_separate_one():
    assert host.weight_bytes(SMOLLM2, "bfloat16") == 2 * 134_515_008  # the published parameter count
    assert host.weight_bytes(SMOLLM2 | {"tie_word_embeddings": False}, "float32") == 4 * 134_515_008
    assert sum(host.parameter_counts(SMOLLM2 | {"tie_word_embeddings": False}).values()) == 134_515_008 + 49152 * 576


def test_floors_follow_from_bandwidth_and_arithmetic_rate():
    latency = host.floors(SMOLLM2, "bfloat16", 53e9, 940e9, workloads.get("latency"))
    assert latency["tpot_s"] == pytest.approx(5.08e-3, rel=0.01)
    assert latency["ttft_s"] == pytest.approx(2 * (128 * 106.2e6 + 28.3e6) / 940e9, rel=0.01)
    assert latency["total_s"] == pytest.approx(128 * latency["tpot_s"])
    offline = host.floors(SMOLLM2, "bfloat16", 53e9, 940e9, workloads.get("offline"))
    assert 2.8 < offline["total_s"] < 3.8  # the products, not the bytes, bind it
    shared = host.floors(SMOLLM2, "bfloat16", 53e9, 940e9, workloads.get("shared_prefix"))
    assert shared["total_shared_s"] < 0.2 * shared["total_s"]


def test_bandwidth_and_products_are_measured_and_the_thread_count_is_put_back():
    import torch

    threads = torch.get_num_threads()
    assert host.measure_bandwidth(threads + 1, size_bytes=2**24, repeats=1) > 1e8
    assert host.measure_gemm("float32", threads + 1, size=128, repeats=1) > 1e8
    assert torch.get_num_threads() == threads
