"""Who is let in, and for how long: keys, sizes, queues, time limits."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from common import http
from tests.puppet import Puppet, Script, in_process
from tests.serving import (
    CONTROL,
    FRONTS,
    Served,
    connection,
    until,
)


@pytest.fixture(scope="module", params=FRONTS)
def strict(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with a key, a tiny body limit and another name."""
    options = {"api_key": "sesame", "max_body_bytes": 2000, "served_model_name": "a/b c"}
    with in_process(request.param, Puppet(request.param, lambda m: Script([5] * m.max_tokens)), **options) as server:
        yield server


def test_a_key_is_asked_for_where_there_is_one(strict: Served) -> None:
    for key in (
        None,
        "",
        "sesame",
        "Bearer",
        "Bearer wrong",
        "Basic sesame",
        "Bearer séſame",
    ):
        headers = {} if key is None else {"authorization": key.encode()}
        for answer in (strict.post(CONTROL, headers=headers), strict.http.get("/v1/models", headers=headers)):
            assert answer.status_code == 401, key
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    good = {"authorization": "Bearer sesame"}
    assert strict.post(CONTROL, headers=good).status_code == 200
    assert strict.http.get("/v1/models", headers=good).json()["data"][0]["id"] == "a/b c"
    assert strict.http.get("/v1/models/a%2Fb%20c", headers=good).status_code == 200
    assert strict.http.get("/health").status_code == 200, "a probe needs no key"


def test_a_body_that_trickles_in_is_given_up(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.3)
    key = {"authorization": "Bearer sesame", "content-type": "application/json"}

    def drip() -> Iterator[bytes]:
        for byte in json.dumps(CONTROL).encode():
            yield bytes([byte])
            time.sleep(0.05)

    answer = strict.http.post("/v1/completions", content=drip(), headers=key)
    assert answer.status_code == 408 and answer.headers["connection"] == "close"
    assert "did not arrive in time" in answer.json()["error"]["message"]
    assert strict.post(CONTROL, headers=key).status_code == 200


@pytest.mark.parametrize("kind", ["many headers", "one header", "an address", "empty lines", "a trailer"])
def test_an_endless_head_ends_the_connection(strict: Served, kind: str) -> None:
    starts = {
        "many headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X-A: " + b"a" * 1000 + b"\r\n"),
        "one header": (b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ", b"a" * 1000),
        "an address": (b"GET /", b"a" * 1000),
        "empty lines": (b"", b"\r\n" * 500),
        "a trailer": (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-A: ",
            b"a" * 1000,
        ),
    }
    start, more = starts[kind]
    sent, answer = 0, b""
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        with suppress(OSError):
            client.sendall(start)
            while sent < 10_000_000:
                client.sendall(more)
                sent += len(more)
        with suppress(OSError):
            answer = client.recv(1000)
    assert sent < 10_000_000, "everything was taken"
    assert not answer or b" 400 " in answer.split(b"\r\n")[0] or kind == "a trailer"
    assert strict.http.get("/health").status_code == 200


def test_an_oversized_body_is_refused_told_or_chunked(strict: Served) -> None:
    key = {"authorization": "Bearer sesame", "content-type": "application/json"}
    for size in (2001, 10_000, 30_000_000):
        body = json.dumps({"prompt": "a" * (size - 14)}).encode()
        assert len(body) == size
        chunks = (body[i : i + 65536] for i in range(0, size, 65536))
        for content in (body, chunks):
            answer = strict.http.post("/v1/completions", content=content, headers=key)
            assert answer.status_code == 413
            assert "2000" in answer.json()["error"]["message"]
    body = json.dumps({"prompt": "a" * 100, "max_tokens": 1}).encode().ljust(2000)
    assert strict.http.post("/v1/completions", content=body, headers=key).status_code == 200
    assert strict.http.post("/v1/completions", content=iter([body]), headers=key).status_code == 200


@pytest.mark.fault(23)
@pytest.mark.parametrize("name", FRONTS)
def test_a_full_queue_says_when_to_come_again(name: str) -> None:
    puppet = Puppet(name, lambda m: Script([5] * m.max_tokens), 0.002)
    with in_process(name, puppet, max_queue=3) as server:
        puppet.flow.clear()
        with connection(server.url, {"prompt": "x", "n": 2}):
            until(lambda: len(puppet.submitted) == 2)
            answer = server.post({"prompt": "x", "n": 2})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert len(puppet.submitted) == 2, "all of a call enters the queue or none of it"
            puppet.flow.set()
            until(lambda: not puppet.open)
            assert server.post({"prompt": "x", "n": 3, "max_tokens": 1}).status_code == 200
        server.forgotten()


@pytest.mark.parametrize("name", FRONTS)
def test_a_request_that_takes_too_long_is_told_so(name: str) -> None:
    """By the status before the first token, by an error in place of [DONE] after it; each choice is ended in the engine."""
    never, slow = [7], [8]
    puppet = Puppet(name, lambda m: Script([] if m.token_ids == never else [5] * m.max_tokens), 0.05)
    bodies = [{"prompt": p, "max_tokens": 200, "stream": s, "n": 2} for p in (never, slow) for s in (False, True)]
    with in_process(name, puppet, request_timeout=2.0) as server, ThreadPoolExecutor(4) as pool:
        *refusals, stream = pool.map(server.post, bodies)
        for answer in refusals:
            assert answer.status_code == 504
            assert answer.json()["error"]["type"] == "server_error"
        assert stream.status_code == 200
        events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line]
        assert "choices" in events[0]
        assert "--request-timeout" in events[-1]["error"]["message"]
        assert "[DONE]" not in stream.text
        server.forgotten()
        until(lambda: len(puppet.aborted) == 8)
        assert server.post({"prompt": "x", "max_tokens": 1}).status_code == 200
