"""Bytes that are no HTTP, bodies made to be expensive, and anything at all: never our fault, never a burden."""

from __future__ import annotations

import gc
import importlib
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import briefly
from tests.serving import (
    CONTROL,
    FRONTS,
    Served,
    refused,
)

HUGE = 10**49


# ---- what is no HTTP ------------------------------------------------------------------------------------------------

NO_HTTP = [
    b"\r\n\r\n", b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n",
]  # fmt: skip


def test_bytes_that_are_no_http_break_nothing(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    for data in NO_HTTP:
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.settimeout(5)
            with suppress(ConnectionError, BrokenPipeError):
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                answer = raw.recv(1000)
                assert not answer or b" 5" not in answer.split(b"\r\n")[0], (data, answer)
    assert served.good(**CONTROL)


# ---- cost of bad bodies ---------------------------------------------------------------------------------------------


def _filled(item: str, head: str, tail: str, size: int = 4 * 2**20) -> bytes:
    return (head + ",".join([item] * ((size - len(head) - len(tail)) // (len(item) + 1))) + tail).encode()


EXPENSIVE = {
    "numbers": ("completion", _filled("1.5", '{"prompt":[', "]}")),
    "objects": ("completion", _filled("{}", '{"prompt":[', "]}")),
    "lists": ("completion", _filled("[]", '{"prompt":[', "]}")),
    "strings": ("completion", _filled('""', '{"prompt":[', "]}")),
    "tokens": ("completion", _filled("1", '{"prompt":[', "]}")),
    "stops": ("completion", _filled('"a"', '{"prompt":"x","stop":[', "]}")),
    "stop tokens": ("completion", _filled("5", '{"prompt":"x","stop_token_ids":[', "]}")),
    "messages": ("chat", _filled("{}", '{"messages":[', "]}")),
    "good messages": ("chat", _filled('{"role":"user","content":""}', '{"messages":[', "]}")),
    "parts": ("chat", _filled("{}", '{"messages":[{"role":"user","content":[', "]}]}")),
    "fields": ("completion", ('{"prompt":"x"' + "".join(f',"{i}":1' for i in range(350_000)) + "}").encode()),
    "inner fields": (
        "chat",
        ('{"messages":[{"role":"user","content":"x"' + "".join(f',"{i}":1' for i in range(350_000)) + "}]}").encode(),
    ),
}


@pytest.mark.parametrize("name", briefly(FRONTS, FRONTS[0], FRONTS[-1]))
@pytest.mark.parametrize("case", EXPENSIVE)
def test_a_body_made_to_be_expensive_is_refused_in_reasonable_time(name: str, case: str) -> None:
    """Processor time of the whole refusal; a server that lists every wrong item needs half a minute and gigabytes."""
    protocol = importlib.import_module(f"{name}.protocol")
    kind, body = EXPENSIVE[case]
    gc.collect()
    gc.freeze()  # as the server does
    start = time.process_time()
    try:
        call = protocol.parse(protocol.ChatCall if kind == "chat" else protocol.CompletionCall, body)
        assert case == "tokens", "refused later, by its length"
        call.sampling({})
    except protocol.ApiError as error:
        assert error.status == 400
        assert len(str(error)) < 1000
    finally:
        gc.unfreeze()
    assert time.process_time() - start < 4


# ---- anything at all ------------------------------------------------------------------------------------------------

words = st.text(max_size=8) | st.sampled_from(["x", "\ud800", "a\udfff", "\x00", "😀", "text", "user", "1003"])
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.sampled_from([0, 1, -1, HUGE, 2**63, 1e308])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)
prompts = words | st.lists(words, max_size=3) | st.lists(st.integers(-1, 1003), max_size=5)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": words | anything}
    ),
    max_size=3,
)
likely = {
    "max_tokens": st.integers(-1, 3), "max_completion_tokens": st.integers(0, 3), "n": st.integers(0, 3),
    "temperature": st.floats(-1, 3), "top_p": st.floats(0, 1), "top_k": st.integers(-2, 5), "min_p": st.floats(0, 1),
    "stop": words | st.lists(words, max_size=3), "stop_token_ids": st.lists(st.integers(0, 1003), max_size=3),
    "seed": st.integers(), "logprobs": st.integers(-1, 21) | st.booleans(), "top_logprobs": st.integers(-1, 21),
    "presence_penalty": st.floats(-3, 3), "frequency_penalty": st.floats(-3, 3), "repetition_penalty": st.floats(0, 3),
    "stream": st.booleans(), "stream_options": st.fixed_dictionaries({"include_usage": st.booleans() | anything}),
    "ignore_eos": st.booleans(), "model": st.sampled_from(["tiny", "other"]), "user": anything, "metadata": anything,
    "echo": anything, "tools": anything, "response_format": anything, "logit_bias": anything,
}  # fmt: skip


@st.composite
def requests(draw: Any) -> tuple[bool, dict[str, Any]]:
    """A chat or completion with mostly sensible fields, a few arbitrary ones, and never many tokens."""
    chat = draw(st.booleans())
    body = {"messages": draw(messages | anything)} if chat else {"prompt": draw(prompts | anything)}
    body["max_tokens"] = 2
    for name in draw(st.lists(st.sampled_from(sorted(likely)), max_size=5, unique=True)):
        body[name] = draw(likely[name] if draw(st.integers(0, 3)) else anything)
    if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 3:
        body["max_tokens"] = 3
    body |= draw(st.dictionaries(words, anything, max_size=1)) if not draw(st.integers(0, 9)) else {}
    return chat, body


def _fuzz(served: Served, chat: bool, body: Any) -> None:
    answer = served.post(body, chat)
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif "text/event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n"), (answer.text, body)
    else:
        assert answer.json()["usage"]["completion_tokens"] >= 1


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.fault(19)
@FUZZ
@given(request=requests())
def test_no_request_is_our_fault(served: Served, request: tuple[bool, dict[str, Any]]) -> None:
    _fuzz(served, *request)


@pytest.mark.full
@settings(FUZZ, max_examples=5000)
@given(request=requests())
def test_no_request_of_many_is_our_fault(served: Served, request: tuple[bool, dict[str, Any]]) -> None:
    _fuzz(served, *request)


@FUZZ
@given(
    body=st.binary(max_size=200) | st.text(max_size=100).map(lambda s: ('{"prompt":' + s).encode("utf-8", "replace")),
    chat=st.booleans(),
)
def test_no_bytes_are_our_fault(served: Served, body: bytes, chat: bool) -> None:
    assert served.post(body, chat).status_code in (200, 400)


def test_after_all_this_nothing_is_left(served: Served) -> None:
    refused(served, served.post({"prompt": ""}), 400)
    served.at_rest()
