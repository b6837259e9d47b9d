"""Measurements count tokens, time and processes honestly: fault 29, and workers that print, crash, hang or leave children."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from common import harness, worker, workloads
from common.engines import Finished
from common.harness import RequestResult, RunResult, Worker, WorkerError, interleave, percentile, ratio, summarise
from common.workloads import Conversation, Request, Turn, Workload

FAKE = '''
"""An engine that answers one token per request and step: the length of the prompt, then counting up."""
import os, subprocess, sys, time
from dataclasses import dataclass

@dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool = False

@dataclass
class Output:
    prompt_token_ids: list
    token_ids: list
    token_times: list
    finish_reason: str
    cached_tokens: int = 3
    error: str = ""

class LLM:
    def __init__(self, model="m", step_s=0.0, trick=""):
        if trick == "refuse":
            raise ValueError("step_s must not be refused")
        if trick == "child":
            subprocess.Popen(["sleep", "600"])
            print("the child runs", file=sys.stderr, flush=True)
        self.step_s, self.trick, self.open, self.steps, self.tokens = step_s, trick, [], 0, 5
    def add(self, prompt, params):
        assert params.ignore_eos
        self.open.append((Output(prompt, [], [], "length"), params.max_tokens, time.perf_counter()))
        return 100 + len(self.open)
    def has_work(self):
        return bool(self.open)
    def step(self):
        if self.trick == "print":
            print("noise on sys.stdout")
            os.write(1, b"noise on descriptor 1\\n")
            subprocess.run(["echo", "noise of a child"])
            sys.stdout.flush()
            assert sys.stdin.read(1) == ""
        if self.trick == "crash":
            print("the last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if self.trick == "child" or self.trick == "hang":
            time.sleep(600)
        if self.trick == "refuse a request":
            self.open[0][0].finish_reason, self.open[0][0].error = "error", "too long by 7"
            return [self.open.pop(0)[0]]
        time.sleep(self.step_s)
        self.steps += 1
        for output, _, added in self.open:
            output.token_ids.append(len(output.prompt_token_ids) + len(output.token_ids))
            output.token_times.append(time.perf_counter() - added)
            self.tokens += 1
        short = 1 if self.trick == "short" else 0
        done = [entry for entry in self.open if len(entry[0].token_ids) == entry[1] - short]
        self.open = [entry for entry in self.open if entry not in done]
        return [entry[0] for entry in done]
    def stats(self):
        return {"forwarded_tokens": self.tokens, "steps": self.steps, "running": len(self.open), "kv_total": 64}
    def close(self):
        print("closed", file=sys.stderr, flush=True)
'''
PROMPTS = ((1, 2, 3), (1, 2, 3), (4,), (5, 6))
LENGTHS = (4, 2, 1, 5)
WORK = Workload("four", tuple(Request(p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)), "")


@pytest.fixture
def chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_chapter").mkdir()
    (tmp_path / "fake_chapter" / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_chapter"


def running(group: int) -> list[int]:
    """Processes of a group; one that is only not reaped yet does not run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def survivors(group: int) -> list[int]:
    """Processes of a group that still run some time after they were told to end."""
    deadline = time.monotonic() + 5
    while running(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return running(group)


def run(total_s: float = 2.0, tpot_s: float | None = 0.1, steps: int = 4) -> RunResult:
    requests = [
        RequestResult(3, 0, 0.5, tpot_s, 0.9, [0.1, 0.1, 0.2], [7, 8, 9, 10]),
        RequestResult(5, 0, 0.7, None, 0.7, [], [7]),
    ]
    known = {"counters": {"steps": steps}, "peaks": {}, "peak_rss_bytes": 0}
    return RunResult.of(requests, total_s, workload="w", engine="e", method="", **known)


def test_tokens_are_counted_from_the_ids_and_rates_from_them():
    result = run()
    assert (result.prompt_tokens, result.output_tokens) == (8, 5)
    assert (result.output_tok_s, result.requests_s) == (2.5, 1.0)
    assert (result.ttft_s, result.tpot_s, result.itl_p50_s) == (0.6, 0.1, 0.1)
    assert result.itl_p99_s == pytest.approx(0.198)


def test_a_run_of_single_tokens_has_no_time_per_token():
    single = RunResult.of(
        [RequestResult(1, 0, 0.5, None, 0.5, [], [7])], 1.0, workload="w", engine="e", method="", counters={}, peaks={},
        peak_rss_bytes=0,
    )  # fmt: skip
    assert single.tpot_s is single.itl_p99_s is None
    with pytest.raises(ValueError, match="a run of w by e has no number 'tpot_s'"):
        single.metric("tpot_s")


@pytest.mark.fault(29)
def test_percentiles_interpolate_instead_of_truncating():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile(range(1, 11), 99) == pytest.approx(9.91)
    assert percentile([3, 1, 2], 0) == 1 and percentile([3, 1, 2], 100) == 3
    assert percentile([7], 99) == 7
    for bad in ([], 50), ([1], 101):
        with pytest.raises(ValueError):
            percentile(*bad)


@pytest.mark.fault(29)
def test_a_summary_has_median_and_spread():
    assert summarise([4, 1, 3, 2, 10]) == {"median": 3, "min": 1, "max": 10, "iqr": 2, "n": 5}


def test_a_ratio_is_taken_round_by_round():
    # The machine was half as fast in the second round; the ratio of two medians would be 2.5 / 3.
    before, after = [run(2.0), run(4.0), run(2.0)], [run(1.0), run(2.0), run(1.2)]
    got = ratio(after, before, "total_s")
    assert got == pytest.approx({"median": 0.5, "min": 0.5, "max": 0.6, "iqr": 0.05, "n": 3})
    assert ratio([run(steps=2)], [run(steps=8)], "counters.steps")["median"] == 0.25
    with pytest.raises(ValueError, match="it is 0"):
        ratio([run()], [run(steps=0)], "counters.steps")
    with pytest.raises(ValueError, match="no number"):
        ratio([run()], [run(tpot_s=None)], "tpot_s")
    with pytest.raises(ValueError):
        ratio([run(), run()], [run()], "total_s")


class Clockwork:
    """An engine in this process: every request takes `step_s` per token, all of them together."""

    name, model, method = "clockwork", "none", "test"

    def __init__(self, step_s: float):
        self.step_s, self.open, self.seen = step_s, {}, []

    def add(self, prompt_ids, max_tokens):
        rid = len(self.seen)
        self.seen.append(prompt_ids)
        self.open[rid] = (Finished(rid, [], []), max_tokens, time.perf_counter())
        return rid

    def step(self):
        time.sleep(self.step_s)
        for item, _, added in self.open.values():
            item.token_ids.append(50 + item.rid)
            item.token_times.append(time.perf_counter() - added)
        done = [item for item, wanted, _ in self.open.values() if len(item.token_ids) == wanted]
        for item in done:
            del self.open[item.rid]
        return done

    def has_work(self):
        return bool(self.open)

    def stats(self):
        return {"steps": 0, "running": len(self.open)}

    def close(self):
        pass


def test_idle_time_before_the_first_arrival_is_not_measured_and_later_arrivals_are_honoured():
    work = Workload("late", (Request((1,), 2, 30.0), Request((2,), 2, 31.0)), "")
    start = time.perf_counter()
    result = worker.drive(Clockwork(0.01), work)
    assert time.perf_counter() - start < 10
    assert 1.0 < result.total_s < 10
    assert result.requests[1].ttft_s < 0.9


def test_a_request_that_falls_due_during_a_step_has_waited_since_then():
    work = Workload("busy", (Request((1,), 1, 0.0), Request((2,), 1, 0.05)), "")
    second = worker.drive(Clockwork(0.2), work).requests[1]
    assert second.ttft_s >= 0.34 and second.e2e_s >= 0.34  # 0.15 s until the engine was free and a step of 0.2 s


def test_the_next_turn_of_a_conversation_carries_the_answer_of_the_last():
    talks = (Conversation((1,), (Turn((10,), 2), Turn((11,), 1))), Conversation((1,), (Turn((20,), 1), Turn((21,), 1))))
    engine = Clockwork(0.001)
    result = worker.drive(engine, Workload("talk", (), "", talks))
    assert sorted(engine.seen) == [(1, 10), (1, 10, 50, 50, 11), (1, 20), (1, 20, 51, 21)]
    assert [r.prompt_tokens for r in result.requests] == [2, 5, 2, 4]


def test_an_engine_that_forgets_a_request_is_found_out():
    class Forgetful(Clockwork):
        def has_work(self):
            return False

    with pytest.raises(RuntimeError, match="no work left, but 4 requests have no output"):
        worker.drive(Forgetful(0.0), WORK)


def test_a_worker_gives_exact_counts_per_request_and_the_growth_of_the_counters(chapter):
    with Worker(chapter, timeout_s=60, step_s=0.002) as fake:
        fake.run(WORK)
        result = fake.run(WORK, peaks=True)
        assert fake.stats() == {"forwarded_tokens": 29, "steps": 10, "running": 0, "kv_total": 64}
    assert [len(r.token_ids) for r in result.requests] == list(LENGTHS)
    assert [r.token_ids[0] for r in result.requests] == [len(p) for p in PROMPTS]
    assert (result.prompt_tokens, result.output_tokens, result.engine) == (9, 12, chapter)
    assert result.counters == {"forwarded_tokens": 12, "steps": 5, "running": 0, "kv_total": 64}
    assert result.peaks == {"running": 3, "kv_total": 64}
    assert 0.01 <= result.total_s < 5 and result.output_tok_s == pytest.approx(12 / result.total_s)
    for request in result.requests:
        assert len(request.itl_s) == len(request.token_ids) - 1 and request.cached_tokens == 3
        assert request.ttft_s + sum(request.itl_s) <= request.e2e_s <= result.total_s
    assert result.peak_rss_bytes > 2**20


def test_a_named_workload_is_the_one_that_the_harness_would_send(chapter):
    with Worker(chapter, timeout_s=60) as fake:
        answer = fake.ask({"cmd": "run", "workload": "offline", "scale": 0.05, "seed": 2})
    want = workloads.get("offline", scale=0.05, seed=2)
    got = RunResult.from_dict(answer["result"])
    assert (got.prompt_tokens, got.output_tokens) == (want.prompt_tokens, want.output_tokens)


def test_nothing_a_library_prints_reaches_the_answers(chapter):
    with Worker(chapter, timeout_s=60, trick="print") as fake:
        assert fake.run(WORK).output_tokens == 12
        assert fake.run(WORK).output_tokens == 12


def test_a_crash_is_told_with_the_signal_and_the_last_words(chapter):
    with Worker(chapter, timeout_s=60, trick="crash") as fake:
        pid = fake._process.pid
        with pytest.raises(WorkerError, match=r"fake_chapter: died during 'run' \(SIGKILL\)\n    the last words"):
            fake.run(WORK)
        with pytest.raises(WorkerError, match="is not running"):
            fake.run(WORK)
    assert not survivors(pid)


def test_a_worker_that_does_not_answer_is_ended_with_its_children(chapter):
    with Worker(chapter, timeout_s=60, trick="child") as fake:
        pid = fake._process.pid
        assert len(running(pid)) == 2
        with pytest.raises(WorkerError, match=r"gave no answer to 'run' within 0\.3 s\n    the child runs"):
            fake.run(WORK, timeout_s=0.3)
        assert not survivors(pid)


def test_an_interrupted_benchmark_leaves_no_process(chapter):
    with pytest.raises(KeyboardInterrupt), Worker(chapter, timeout_s=60, trick="child") as fake:
        pid = fake._process.pid
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert not survivors(pid)


@pytest.mark.parametrize(
    ("trick", "message"),
    [
        ("refuse", "ValueError: step_s must not be refused"),
        ("refuse a request", "RuntimeError: fake_chapter: a request with 3 prompt tokens failed: too long by 7"),
        ("short", r"a request with 3 prompt tokens gave 1 tokens \(length\) where 4 or 2 were due"),
    ],
)
def test_a_run_that_is_not_what_was_asked_for_fails_with_the_reason(chapter, trick, message):
    with pytest.raises(WorkerError, match=message), Worker(chapter, timeout_s=60, trick=trick) as fake:
        fake.run(WORK)


def test_an_engine_that_does_not_exist_is_one_clear_error():
    with (
        pytest.raises(WorkerError, match="worker for ch99_none: ModuleNotFoundError"),
        Worker("ch99_none", timeout_s=60),
    ):
        pass


def test_rounds_are_interleaved_in_a_balanced_order_after_the_warm_up(monkeypatch):
    order = []

    class Silent:
        def __init__(self, name):
            self.name = name

        def run(self, workload, peaks):
            order.append(self.name)
            return replace(run(), total_s=len(order))

    runs = interleave({"a": Silent("a"), "b": Silent("b")}, WORK, rounds=4, warmup=1)
    assert "".join(order) == "ba" + "abbaabba"
    assert [r.total_s for r in runs["a"]] == [3, 6, 7, 10] and [r.total_s for r in runs["b"]] == [4, 5, 8, 9]


@pytest.mark.fault(29)
def test_a_result_file_tells_host_commit_date_and_command_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/secret/bench.py", "--quick", "--json", "/somewhere/secret/out.json"])
    path = tmp_path / "results" / "ch04.json"
    harness.save_result(path, {"ratio": 0.5}, threads=2)
    data = json.loads(path.read_text())
    assert list(data) == ["host", "commit", "date", "command", "ratio"]
    assert data["host"]["threads"] == 2 and data["host"]["versions"]["torch"] and data["host"]["cores"] >= 1
    assert data["command"].endswith("--quick --json out.json") and data["date"].endswith("+00:00")
    assert "secret" not in path.read_text() and os.uname().nodename not in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["ch04.json"]
    with pytest.raises(ValueError, match="may not set host"):
        harness.save_result(path, {"host": {}})


def test_the_parent_is_the_one_that_chapter_toml_names(tmp_path):
    for name, text in {"ch02_a": "", "ch03_b": 'parent = "ch02_a"\n'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "chapter.toml").write_text(text)
    assert harness.parent_of("ch03_b", tmp_path) == "ch02_a"
    assert harness.parent_of("ch02_a", tmp_path) is None
