"""Clients that hang up, read slowly or ask for too much: nobody else notices, and nothing of them is left."""

from __future__ import annotations

import importlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import pytest

from tests.puppet import InProcess, Puppet, Script, in_process
from tests.serving import (
    CONTROL,
    FRONTS,
    LARGE,
    Served,
    connection,
    until,
)

MOMENTS = ("headers", "body", "queued", "first", "stream", "n", "whole", "end")


def hang_up(url: str, moment: str, rng: random.Random) -> None:
    """One client that goes away at this moment, with a FIN or with a RST."""
    body = {"prompt": "x" * rng.randint(1, 400), "max_tokens": rng.randint(1, 80), "ignore_eos": True, "stream": True}
    body |= {"n": rng.randint(2, 4)} if moment == "n" else {"stream": False} if moment in ("whole", "queued") else {}
    part = rng.uniform(0.05, 0.3) if moment == "headers" else rng.uniform(0.7, 0.99) if moment == "body" else 1.0
    with connection(url, body, part=part) as raw:
        if rng.random() < 0.3:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if moment in ("first", "whole", "headers", "body"):
            time.sleep(rng.uniform(0, 0.2))
        elif moment in ("stream", "n"):
            for _ in range(rng.randint(1, 20)):
                if not raw.recv(rng.randint(1, 2000)):
                    break
        elif moment == "end":
            seen = b""
            while b"data: [DONE]" not in seen and (part := raw.recv(65536)):
                seen += part


def hundred(url: str, seed: int) -> None:
    """100 clients, 16 at a time, that hang up at random moments."""
    rng = random.Random(seed)
    jobs = [(url, MOMENTS[i % len(MOMENTS)], random.Random(rng.random())) for i in range(100)]
    rng.shuffle(jobs)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: hang_up(*job), jobs))


@pytest.mark.fault(6)
def test_a_hundred_clients_that_hang_up_leave_nothing_behind(served: Served) -> None:
    before = served.good(**CONTROL)["choices"]
    served.at_rest()
    ended = sum(v for k, v in served.metrics().items() if k.startswith("minisgl_requests_total"))
    hundred(served.url, seed=1)
    served.at_rest()
    assert served.good(**CONTROL)["choices"] == before
    after = served.metrics()
    assert after["minisgl_requests_total{abort}"] > 0
    assert sum(v for k, v in after.items() if k.startswith("minisgl_requests_total")) > ended + 60


@pytest.mark.fault(6)
def test_the_engine_stops_computing_for_a_client_that_has_gone(served: Served) -> None:
    """And not only the interface. A busy machine may notice late: one of five times is enough."""
    body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}

    def computed() -> float:
        served.at_rest()
        before = served.metrics()["minisgl_decode_tokens_total"]
        with connection(served.url, body) as raw:
            raw.recv(1000)
        time.sleep(0.05)
        served.at_rest()
        return served.metrics()["minisgl_decode_tokens_total"] - before

    assert any(computed() < 400 for _ in range(5))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_many_hundreds_that_hang_up_leave_nothing_behind(served: Served, seed: int) -> None:
    before = served.good(**CONTROL)["choices"]
    hundred(served.url, seed=100 + seed)
    served.at_rest()
    assert served.good(**CONTROL)["choices"] == before


@pytest.fixture(scope="module", params=FRONTS)
def puppet(request: pytest.FixtureRequest) -> Puppet:
    return Puppet(request.param, lambda m: Script([5] * m.max_tokens), 0.002)


@pytest.fixture(scope="module")
def near(puppet: Puppet) -> Iterator[InProcess]:
    """A server in this process, so that its maps and tasks can be counted."""
    with in_process(puppet.chapter, puppet) as server:
        yield server


@pytest.mark.fault(23)
def test_no_map_counter_or_task_remembers_a_client_that_hung_up(near: InProcess, puppet: Puppet) -> None:
    hundred(near.url, seed=2)
    near.forgotten()
    until(lambda: not puppet.open)
    assert near.good(**CONTROL)["usage"]["completion_tokens"] == 6
    near.forgotten()


@pytest.mark.parametrize("moment", ["whole", "stream", "three choices", "chat"])
def test_a_client_that_leaves_while_nothing_moves_is_aborted(near: InProcess, puppet: Puppet, moment: str) -> None:
    """No token will ever come that could show a broken connection: the hang-up itself must be noticed."""
    near.forgotten()
    puppet.flow.clear()
    try:
        body = {"prompt": "x", "stream": moment != "whole", "n": 3 if moment == "three choices" else 1}
        body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]} if moment == "chat" else {}
        with connection(near.url, body, chat=moment == "chat"):
            until(lambda: len(puppet.open) == body["n"])
        until(lambda: not puppet.open)
        near.forgotten()
    finally:
        puppet.flow.set()


def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_aborted(near: InProcess, puppet: Puppet) -> None:
    gate = threading.Event()
    encode = near.frontend.tokenizer.encode

    def slow(*args: Any) -> list[int]:
        gate.wait(10)
        return encode(*args)

    submitted = len(puppet.submitted)
    server = importlib.import_module(f"{near.chapter}.server")
    with mock.patch.object(near.frontend.tokenizer, "encode", slow), mock.patch.object(server, "INLINE_CHARS", 0):
        with connection(near.url, {"prompt": "x", "max_tokens": 400}):
            time.sleep(0.2)
        time.sleep(0.1)
        gate.set()
        near.forgotten()
    until(lambda: not puppet.open)
    assert len(puppet.submitted) <= submitted + 1


def test_a_slow_reader_gets_everything_and_holds_up_nobody(near: InProcess, puppet: Puppet) -> None:
    with connection(near.url, LARGE, chat=True) as raw:
        seen = bytearray(raw.recv(1000))
        until(lambda: not puppet.open)
        assert near.good(**CONTROL)["usage"]["completion_tokens"] == 6
        assert not near.frontend.streams, "for the engine and its memory the request is over"
        assert near.tasks() > near.tasks_at_rest, "the answer waits for its reader: it was no test otherwise"
        while not seen.endswith(b"0\r\n\r\n"):
            part = raw.recv(1 << 20)
            assert part
            seen += part
    assert len(seen) > 4_000_000
    assert b"data: [DONE]" in seen
    assert seen.count(b'"finish_reason": "length"') == 8
    near.forgotten()


def test_a_slow_reader_that_hangs_up_is_forgotten(near: InProcess, puppet: Puppet) -> None:
    with connection(near.url, LARGE, chat=True) as raw:
        raw.recv(1000)
        until(lambda: not puppet.open)
        assert near.tasks() > near.tasks_at_rest
    near.forgotten()


def test_a_huge_prompt_stalls_neither_streams_nor_health(served: Served) -> None:
    """Megabytes take seconds to tokenize; nobody else may wait for a good part of them, not even to be let in."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    gaps, probes, over = [0.0], [0.0], threading.Event()

    def stream() -> None:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
            while not over.is_set():
                last = time.monotonic()
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_raw():
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()

    def probe() -> None:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
            while not over.is_set():
                start = time.monotonic()
                assert client.get("/health").status_code == 200
                probes.append(time.monotonic() - start)
                time.sleep(0.02)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(stream), pool.submit(probe)]
        try:
            start = time.monotonic()
            assert served.post({"prompt": ["a" * 20_000] * 200}).status_code == 400
            took = time.monotonic() - start
        finally:
            over.set()
        for job in jobs:
            job.result(30)
    assert took > 0.5, "too quick to show anything: use a larger prompt"
    assert len(gaps) > 20
    assert max(gaps) < took / 2, f"a stream stood still for {max(gaps):.2f} s of {took:.2f}"
    assert max(probes) < took / 3, f"/health took {max(probes):.2f} s of {took:.2f}"
