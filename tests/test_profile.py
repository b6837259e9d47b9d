"""The profile's parts add up to the step, its floors are those of the arithmetic, and the chapter is left as it was."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest

from common import profile, profile_grid
from common.engines import ChapterEngine
from common.profile_clock import ATTENTION, DETOKENIZER, LINEARS, MODEL, REST, SAMPLER, SCHEDULER, Clock, Step, attached
from common.worker import drive
from common.workloads import get
from tests.conftest import ENGINES

TINY = {"model": "dummy:llama-tiny", "dtype": "float32", "threads": 1}
WORK = get("offline", 512, 4 / 64, length_scale=0.05)


@pytest.fixture(params=[ENGINES[0], ENGINES[-1]])
def engine(request):
    made = ChapterEngine(request.param, dict(TINY))
    yield made
    made.close()


def test_nested_calls_count_for_the_innermost_part():
    clock = Clock()
    inner = clock.timed("inner", lambda: time.sleep(0.02))

    def outer() -> None:
        time.sleep(0.01)
        inner()

    item = SimpleNamespace(
        req=SimpleNamespace(cached_len=5, state=SimpleNamespace(name="DECODE")), extend_len=3, samples=True
    )
    schedule = clock.seen(lambda: SimpleNamespace(items=[item, item], tokens=6))
    clock.step(lambda: (schedule(), clock.timed("outer", outer)()))()
    (step,) = clock.steps
    assert step.parts["inner"] >= 0.02 and step.parts["outer"] >= 0.01
    assert sum(step.parts.values()) == pytest.approx(step.total_s, abs=1e-4)
    # 3 tokens after 5: they see 6, 7 and 8 tokens
    assert (step.rows, step.logit_rows, step.context, step.pairs, step.decode) == (6, 2, 16, 42, True)


def test_every_part_of_a_chapter_is_seen_and_the_parts_add_up(engine):
    clock = Clock()
    plain = drive(engine, WORK)
    kv = getattr(engine.llm.engine, "kv", None)
    if kv is not None and hasattr(kv, "flush"):
        kv.flush()
    with attached(engine.llm, engine.name, clock):
        result = drive(engine, WORK)
    assert [r.token_ids for r in result.requests] == [r.token_ids for r in plain.requests]
    assert len(clock.steps) == result.counters["steps"]
    assert sum(step.rows for step in clock.steps) == result.counters["forwarded_tokens"]
    seen = {part for step in clock.steps for part, seconds in step.parts.items() if seconds > 0}
    assert {LINEARS, ATTENTION, MODEL, SAMPLER, SCHEDULER, DETOKENIZER, REST} <= seen
    for step in clock.steps:
        assert sum(step.parts.values()) == pytest.approx(step.total_s, rel=0.02, abs=5e-5)


def test_afterwards_nothing_is_wrapped_any_more(engine):
    inner = engine.llm.engine
    owners = [engine.llm, inner.scheduler, inner.sampler, inner.runner, inner.runner.backend, inner.runner.model.head]
    tokenizer = __import__(f"{engine.name}.tokenizer", fromlist=["Detokenizer"]).Detokenizer
    before, push = [dict(vars(owner)) for owner in owners], tokenizer.push
    with attached(engine.llm, engine.name, Clock()):
        assert tokenizer.push is not push
        assert all(dict(vars(owner)) != kept for owner, kept in zip(owners, before, strict=True))
    assert tokenizer.push is push
    assert all(dict(vars(owner)) == kept for owner, kept in zip(owners, before, strict=True))


CONFIG = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
    "vocab_size": 100, "tie_word_embeddings": True, "model_type": "llama",
}  # fmt: skip


def test_the_floor_is_bytes_over_bandwidth_or_operations_over_rate():
    linear = 2 * (8 * (2 * 8 + 2 * 4) + 3 * 8 * 16)
    slow_memory = profile.Floor(CONFIG, "bfloat16", bandwidth=1.0, flops=1e12)
    assert slow_memory.linears(1, 1) == (linear + 800) * 2 and slow_memory.linears(1, 0) == linear * 2
    assert slow_memory.attention(10, 10) == 10 * 2 * 2 * 2 * 2 * 2  # tokens, K and V, layers, heads, dim, bytes
    slow_math = profile.Floor(CONFIG, "float32", bandwidth=1e12, flops=1.0)
    assert slow_math.linears(3, 2) == 2 * (linear * 3 + 800 * 2)
    assert (
        slow_math.attention(10, 30) == 30 * 4 * 2 * 4 * 2
    )  # pairs, two products of two operations, layers, heads, dim


def test_the_breakdown_is_a_mean_over_steps():
    floor = profile.Floor(CONFIG, "float32", 1e9, 1e9)
    steps = [
        Step(1.0, {LINEARS: 0.6, REST: 0.4}, True, 1, 1, 1, 5, 5),
        Step(3.0, {LINEARS: 1.4, REST: 1.6}, True, 1, 3, 1, 9, 9),
    ]
    found = profile.breakdown(steps, floor)
    assert (found["steps"], found["rows"], found["context"], found["total_s"]) == (2, 2.0, 7.0, 2.0)
    assert found["parts"][LINEARS]["s"] == 1.0 and found["parts"][LINEARS]["share"] == 0.5
    assert found["parts"][ATTENTION]["s"] == 0.0 and "floor_s" not in found["parts"][REST]
    assert list(profile.kinds([steps[0], Step(1.0, {}, False)])) == ["decode", "with prompts"]


def test_moved_tokens_keep_lengths_and_stay_in_range():
    moved = profile._shifted(WORK, 7)
    assert moved.prompt_lengths() == WORK.prompt_lengths() and moved != WORK
    ids = {i for r in WORK.requests for i in r.prompt_ids}
    assert all(min(ids) <= i <= max(ids) for r in moved.requests for i in r.prompt_ids)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("common.compare_measure.measure_bandwidth", lambda threads: 50e9)
    monkeypatch.setattr("common.compare_measure.measure_gemm", lambda dtype, threads: 500e9)


def run(monkeypatch, tmp_path, *flags: str) -> dict:
    more = ["--model", "dummy:llama-tiny", "--dtype", "float32", "--threads", "1", "--quick"]
    out = ["--json", str(tmp_path / "p.json"), "--figures", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["profile", *flags, *more, *out])
    assert profile.main() == 0
    assert len(list(tmp_path.glob("*.png"))) == 1
    return json.loads((tmp_path / "p.json").read_text())


def test_the_command_writes_table_and_figure(quick, monkeypatch, tmp_path, capsys):
    data = run(monkeypatch, tmp_path, "08", "--workload", "latency", "--length-scale", "0.1")
    assert data["steps"]["decode"]["rows"] == 1.0 and data["clock_costs"]["n"] == 1
    names = [row[0] for row in data["tables"]["decode"]["rows"]]
    assert names[:2] == ["linears", "attention"] and names[-1] == "whole step"
    assert data["tables"]["decode"]["rows_zh"][0][0] == "线性层"
    assert "the clock: a run with it takes" in capsys.readouterr().out


def test_over_http_the_server_has_a_row(quick, monkeypatch, tmp_path):
    data = run(monkeypatch, tmp_path, ENGINES[-1], "--workload", "latency", "--length-scale", "0.1", "--http")
    assert data["tables"]["decode"]["rows"][-1][0] == "server" and data["http_ratio"]["n"] == 1


def test_the_grid_measures_full_decode_steps_of_that_size(quick, monkeypatch, tmp_path):
    data = run(monkeypatch, tmp_path, ENGINES[-1], "--grid", "--batches", "1", "4", "--contexts", "20", "60")
    assert [(c["batch"], c["context"]) for c in data["cells"]] == [(1, 20), (4, 20), (1, 60), (4, 60)]
    for one in data["cells"]:
        assert one["step_s"] >= one["attention_s"] > 0 and one["linears_s"] > 0 and one["floor_s"] > 0
    assert len(data["tables"]["step"]["rows"]) == 2


def test_the_pretended_prompts_leave_requests_of_that_length():
    engine = ChapterEngine("ch06_batching", {**TINY, "max_model_len": 400, "max_batch_tokens": 64})
    try:
        steps = profile_grid.cell(engine, 3, 100)
        assert len(steps) == profile_grid.STEPS and all(step.rows == step.requests == 3 for step in steps)
        # admission takes five steps, in which those that are in already go on
        assert all(300 < step.context < 3 * 120 and step.decode for step in steps)
        assert not engine.llm.has_work() and engine.stats()["kv_used"] == 0
        assert profile_grid.cell(engine, 100, 20) == []  # more than max_running
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["02"], "ch02_request_flow has no model"),
        (["04", "--http"], "ch04_kvcache has no server"),
        (["99"], "unknown chapter"),
        (["08", "--http", "--workload", "multi_turn"], "do not go over HTTP"),
        (["08", "--grid", "--contexts", "100000"], "contexts at most"),
        (["03", "--grid", "--contexts", "64"], "ch03_generation has no KV cache"),
        (["08", "--rounds", "-1"], "must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_one_line(quick, monkeypatch, flags, message):
    monkeypatch.setattr(sys, "argv", ["profile", *flags, "--model", "dummy:llama-tiny", "--quick", "--threads", "1"])
    with pytest.raises(ValueError, match=message):
        profile.main()
