"""The load client: honest counts, honest latencies, a schedule that slow answers do not stretch, and bounds on everything."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import harness
from common.load import LoadOptions, load, poisson
from common.load_result import Exchange, LoadRequest, LoadResult, outcome
from common.workloads import Request, Workload, get
from tests.fake_server import FakeServer, Plan

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.reset()
    return running


def at(*arrivals: float, max_tokens: int = 4) -> Workload:
    requests = tuple(Request((7, 8, 9 + i), max_tokens, arrival_s=t) for i, t in enumerate(arrivals))
    return Workload("some", requests, "some requests")


def stream(*events: tuple[float, object], due: float = 0.0, sent: float | None = None) -> Exchange:
    """An exchange that got these events, JSON or raw data, at these times."""
    data = [(t, b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n") for t, e in events]
    return Exchange(
        0, 8, due, b"", sent if sent is not None else due, events[-1][0] if events else due, 200, None, data
    )


def chunk(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(tokens: int) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_a_request_asks_for_exactly_its_tokens_as_a_greedy_stream_with_usage(server: FakeServer):
    load(server.url + "/v1/", at(0.0), model="m", api_key="secret")
    assert server.bodies == [
        {
            "prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "model": "m",
        }
    ]  # fmt: skip
    assert server.keys == ["Bearer secret"]


def test_a_text_prompt_is_sent_as_text_and_no_model_as_no_field(server: FakeServer):
    load(server.url, Workload("some", (Request((), 4, text="Hello"),), ""))
    assert server.bodies[0]["prompt"] == "Hello" and "model" not in server.bodies[0]


# ---- counts and latencies -------------------------------------------------------------------------------------------


@pytest.mark.fault(29)
def test_tokens_are_counted_by_usage_and_not_by_events(server: FakeServer):
    server.plan = lambda body, i: Plan(per_chunk=3, gap_s=0.01)
    result = load(server.url, at(0.0, 0.0, max_tokens=8))
    assert [(r.completion_tokens, r.chunks, len(r.itl_s)) for r in result.requests] == [(8, 3, 2)] * 2
    assert result.output_tokens == 16 and result.tokens_per_chunk == pytest.approx(16 / 6)
    for r in result.requests:
        assert (
            sum(r.itl_s) <= 7 * r.tpot_s + 1e-9 <= r.e2e_s - r.ttft_s + 1e-6
        )  # 7 gaps of tokens, though 3 chunks came
        assert (r.prompt_tokens, r.cached_tokens, r.finish_reason, r.status) == (3, 3, "length", 200)
        assert r.text == "w" * 8


def test_events_without_text_are_neither_a_first_token_nor_a_gap():
    r = outcome(
        stream(
            (1.0, chunk("")),
            (2.0, chunk("a")),
            (2.5, chunk("b")),
            (2.6, chunk("", "stop")),
            (2.7, usage(2)),
            (3.0, b"[DONE]"),
        )
    )
    assert (r.ttft_s, r.itl_s, r.chunks, r.e2e_s) == (2.0, [0.5], 2, 3.0)
    assert (
        r.tpot_s == pytest.approx(0.6) and r.error is None
    )  # the last token came with the finish_reason at the latest


def test_an_answer_whose_tokens_have_no_text_has_a_first_token_still():
    r = outcome(stream((1.0, chunk("", "length")), (1.1, usage(1)), (1.2, b"[DONE]")))
    assert (r.ttft_s, r.tpot_s, r.chunks, r.completion_tokens, r.error) == (1.0, None, 0, 1, None)


def test_all_text_in_one_chunk_has_no_time_per_token():
    r = outcome(stream((1.0, chunk("abcdefgh")), (1.001, chunk("", "length")), (1.001, usage(8)), (1.002, b"[DONE]")))
    assert r.tpot_s is None and r.itl_s == []


def test_latency_counts_from_when_the_request_was_due_not_from_when_it_was_sent():
    r = outcome(stream((2.0, chunk("a", "length")), (2.0, usage(1)), (2.5, b"[DONE]"), due=1.0, sent=1.7))
    assert (r.ttft_s, r.e2e_s) == (1.0, 1.5)
    assert LoadResult("w", "m", 2.5, [r]).late_s == pytest.approx(0.7)


def test_events_cut_anywhere_by_the_network_read_the_same():
    whole = stream((1.0, chunk("é中")), (1.0, chunk("b", "length")), (1.0, usage(2)), (1.0, b"[DONE]"))
    bytes_ = b": ping\r\n\r\n" + b"".join(part for _, part in whole.received).replace(b"\n", b"\r\n")
    whole.received = [(1.0, bytes_[i : i + 1]) for i in range(len(bytes_))]
    r = outcome(whole)
    assert (r.text, r.chunks, r.error) == ("é中b", 2, None)


@pytest.mark.fault(29)
def test_the_clock_begins_with_the_first_arrival(server: FakeServer):
    result = load(server.url, at(50.0, 50.1))
    assert 0.1 <= result.total_s < 5


def test_percentiles_interpolate_over_the_answered_requests_only():
    rows = [LoadRequest(i, 4, 0.0, 0.0, 200, ttft_s=float(i), itl_s=[0.1 * i], completion_tokens=4) for i in range(11)]
    rows.append(LoadRequest(11, 4, 0.0, 0.0, 500, "500: broken"))
    result = LoadResult("w", "m", 2.0, rows)
    assert result.points("ttft_s") == {"p50": 5.0, "p90": 9.0, "p99": pytest.approx(9.9), "max": 10.0}
    assert result.points("itl_s")["p90"] == pytest.approx(0.9) and result.points("tpot_s") is None
    assert (result.totals()["output_tok_s"], result.totals()["requests_s"]) == (22.0, 5.5)
    assert result.totals()["wrong_length"] == 0


# ---- open and closed loop -------------------------------------------------------------------------------------------


def test_open_loop_sends_on_schedule_however_slow_the_answers_are(server: FakeServer):
    server.plan = lambda body, i: Plan(gate=4, first_s=0.2, exclusive=True)
    result = load(server.url, at(0.0, 0.05, 0.1, 0.15), timeout_s=20.0)
    assert not result.errors  # a client that waits for an answer never gets it: all four must have come before
    assert [r.due_s for r in result.requests] == [0.0, 0.05, 0.1, 0.15]
    # The last to be served waits for three others on the server: a client that sent it late would not have seen that.
    assert result.points("ttft_s")["max"] >= 4 * 0.2 - 0.15


def test_more_requests_are_open_at_once_than_a_usual_connection_pool_has(server: FakeServer):
    server.plan = lambda body, i: Plan(gate=120)
    result = load(server.url, at(*[0.0] * 120), timeout_s=20.0)
    assert server.most_open == 120 and not result.errors


def test_closed_loop_keeps_each_client_busy_and_none_doubly(server: FakeServer):
    server.plan = lambda body, i: Plan(first_s=0.05)
    result = load(server.url, at(*[9.0 * i for i in range(6)]), concurrency=2)
    assert server.most_open == 2 and result.method == "HTTP, closed loop, concurrency 2"
    assert 0.15 <= result.total_s < 5  # arrival times of the workload do not count
    assert all(0.05 <= r.ttft_s < 5 for r in result.requests)
    assert sorted(b["prompt"][2] for b in server.bodies) == [9, 10, 11, 12, 13, 14]


def test_poisson_arrivals_have_their_rate_and_keep_the_requests():
    base = get("offline", scale=16)
    slow, fast = poisson(base, 2.0), poisson(base, 8.0)
    arrivals = [r.arrival_s for r in slow.requests]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    assert len(arrivals) / arrivals[-1] == pytest.approx(2.0, rel=0.1)
    assert [r.arrival_s * 4 for r in fast.requests] == pytest.approx(arrivals)
    assert [r.prompt_ids for r in slow.requests] == [r.prompt_ids for r in base.requests]
    with pytest.raises(ValueError, match="rate"):
        poisson(base, 0.0)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_each_kind_of_failure_is_told_and_the_others_are_measured(server: FakeServer):
    plans = [
        Plan(),
        Plan(status=429),
        Plan(status=500),
        Plan(break_after=2),
        Plan(error_after=1),
        Plan(leave_out="usage"),
        Plan(leave_out="finish"),
        Plan(leave_out="done"),
    ]
    server.plan = lambda body, i: plans[body["prompt"][2] - 9]
    result = load(server.url, at(*[0.02 * i for i in range(8)]))
    errors = [r.error for r in result.requests]
    assert errors[:3] == [None, "429: refused with 429", "500: refused with 500"]
    assert errors[3].startswith("the stream broke") and result.requests[3].chunks == 2
    assert errors[4] == "the engine died" and result.requests[4].chunks == 1
    assert errors[5:] == [f"the stream ended without {what}" for what in ("usage", "finish_reason", "[DONE]")]
    assert [r.status for r in result.requests] == [200, 429, 500, 200, 200, 200, 200, 200]
    assert all(r.ttft_s is None and r.completion_tokens == 0 for r in result.requests[1:])
    assert result.output_tokens == 4 and sum(result.errors.values()) == 7
    assert len(server.bodies) == 8  # nothing is repeated
    with pytest.raises(ValueError, match="7 of 8 requests failed"):
        result.run_result("fake")


def test_an_answer_of_another_length_is_counted(server: FakeServer):
    server.plan = lambda body, i: Plan(tokens=2)
    result = load(server.url, at(0.0))
    assert (result.wrong_length, result.output_tokens, result.errors) == (1, 2, {})


def test_an_answer_that_is_no_stream_is_an_error():
    r = outcome(Exchange(0, 4, 0.0, b"", 0.0, 1.0, 200, None, [(1.0, b'{"choices": []}')]))
    assert r.error == "the stream ended without finish_reason, usage, [DONE]"
    assert "no JSON" in outcome(stream((1.0, b"<html>"))).error


def test_a_request_is_bounded_in_time_and_its_connection_closed(server: FakeServer):
    server.plan = lambda body, i: Plan(hold=i == 0)
    result = load(server.url, at(0.0, 0.1), timeout_s=2.0)
    assert [r.error for r in result.requests] == ["no complete answer within 2 s", None]
    deadline = time.monotonic() + 5
    while server.left != [0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.left == [0]


def test_the_run_is_bounded_in_time(server: FakeServer):
    server.plan = lambda body, i: Plan(hold=i > 0)
    started = time.monotonic()
    result = load(server.url, at(0.0, 0.05, 60.0), total_timeout_s=2.0)
    assert time.monotonic() - started < 10
    assert [r.error for r in result.requests] == [None, "cut off: the run took 2 s", "not sent: the run took 2 s"]
    assert result.requests[2].sent_s is None


def test_a_server_that_is_away_fails_every_request():
    result = load("http://127.0.0.1:9", at(0.0, 0.0))
    assert list(result.errors.values()) == [2] and "no answer" in next(iter(result.errors))


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7:8000", "http://example.org", "http://0.0.0.0:1", "http://127.0.0.1.evil.org"]
)
def test_load_goes_to_this_machine_only(url: str):
    with pytest.raises(ValueError, match="not this machine"):
        load(url, at(0.0))
    LoadOptions(allow_remote=True).check(url, at(0.0))


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.8.9.1", "http://[::1]:8000/v1"])
def test_loopback_addresses_are_this_machine(url: str):
    LoadOptions().check(url, at(0.0))


def test_what_cannot_be_sent_is_refused(server: FakeServer):
    with pytest.raises(ValueError, match="3 requests are more than the limit of 2"):
        load(server.url, at(0.0, 0.0, 0.0), max_requests=2)
    with pytest.raises(ValueError, match="conversations"):
        load(server.url, get("multi_turn"))
    with pytest.raises(ValueError, match="expected an address"):
        load("127.0.0.1:8000", at(0.0))
    for bad in ({"concurrency": 0}, {"timeout_s": 0.0}, {"total_timeout_s": float("nan")}):
        with pytest.raises(ValueError):
            load(server.url, at(0.0), **bad)
    assert not server.bodies


# ---- results --------------------------------------------------------------------------------------------------------


def test_a_run_compares_with_runs_of_the_harness(server: FakeServer):
    result = load(server.url, at(0.0, 0.0))
    run = result.run_result("fake", {"steps": 3})
    assert (run.output_tokens, run.prompt_tokens, run.metric("counters.steps")) == (8, 6, 3)
    assert run.output_tok_s == pytest.approx(8 / result.total_s) and run.ttft_s == result.points("ttft_s")["p50"]
    assert harness.ratio([run], [run], "ttft_s")["median"] == 1.0
    assert harness.RunResult.from_dict(json.loads(json.dumps(run.totals() | {"requests": []}))).engine == "fake"


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.load", *args], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_command_prints_a_table_and_writes_a_result_without_the_key(server: FakeServer, tmp_path: Path):
    server.plan = lambda body, i: Plan(per_chunk=2, status=429 if i == 1 else 200)
    flags = ["--workload", "offline", "--scale", "0.05", "--length-scale", "0.1", "--rate", "50"]
    done = command("--url", server.url, *flags, "--api-key", "hush-hush", "--json", str(tmp_path / "r.json"))
    assert done.returncode == 1, done.stderr  # one request failed
    for text in (
        "TTFT",
        "p99",
        "2 of 3 requests answered",
        "tokens on average",
        "error (1 of 3 requests): 429: refused with 429",
    ):
        assert text in done.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["load"]["answered"] == 2 and data["load"]["workload"] == "offline" and "cores" in data["host"]
    assert len(data["requests"]) == 3 and "hush" not in json.dumps(data) and "--api-key KEY" in data["command"]
    assert server.bodies[0]["model"] == "fake" and server.keys[0] == "Bearer hush-hush"


def test_a_server_that_is_away_or_elsewhere_is_one_line_and_status_2():
    for url, text in (("http://127.0.0.1:9", "no server answers"), ("http://10.1.2.3", "--allow-remote")):
        done = command("--url", url, "--scale", "0.05")
        assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_load_leaves_no_task_behind(server: FakeServer):
    async def both() -> int:
        from common.load import run

        await run(server.url, at(0.0, 60.0), LoadOptions(total_timeout_s=0.2))
        return len(asyncio.all_tasks())

    assert asyncio.run(both()) == 1
