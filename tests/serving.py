"""What the tests of the servers share: a server in a process of its own, its clients, and what they expect of it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from common.api import Events
from common.service import Server
from common.tiny import cached_tiny_model
from tests.copies import copies

MAX_MODEL_LEN = 512
CONTROL = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}  # what bad requests must not change
GAUGES = ("minisgl_running", "minisgl_waiting", "minisgl_kv_used", "minisgl_open_requests")
# Eight choices with logprobs make an answer larger than what the sockets between take up: a writer has to wait.
LARGE = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "stream": True, "n": 8}
LARGE |= {"logprobs": True, "top_logprobs": 20}

# What does not depend on the engine is tested where these files differ, and how a process ends where those do.
FRONTS = copies("serve.py", "server.py", "exchange.py", "protocol.py", "frontend.py")
PROCESSES = copies("serve.py", "frontend.py")


@functools.cache
def tiny_folder() -> Path:
    return cached_tiny_model("llama", max_position_embeddings=2048)


def tiny_flags(max_model_len: int = MAX_MODEL_LEN) -> list[str]:
    """Flags of an exact and frugal server of the tiny model."""
    model = ["--model", str(tiny_folder()), "--served-model-name", "tiny", "--max-model-len", str(max_model_len)]
    return [*model, "--dtype", "float32", "--threads", "1", "--debug-invariants"]


@dataclass
class Served:
    """A running server and the clients for it."""

    chapter: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)  # of the LLM that gives the same answers in this process
    control: Any = None  # the choices that CONTROL was answered with first

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.ai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def close(self) -> None:
        self.http.close()
        self.ai.close()

    def post(self, body: Any, chat: bool = False, **more: Any) -> httpx.Response:
        """POST a JSON body that may hold what JSON forbids: lone surrogates, NaN, Infinity."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | more.pop("headers", {})
        return self.http.post(path, content=content, headers=headers, **more)

    def good(self, chat: bool = False, **body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        answer = self.post(body, chat)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, chat: bool = False, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that must end with [DONE]."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            parser = Events()
            data = [event for part in answer.iter_raw() for event in parser.feed(part)]
        assert data[-1] == "[DONE]"
        return [json.loads(event) for event in data[:-1]]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics; those with labels as name{value}."""
        text = self.http.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name + "".join(f"{{{v}}}" for v in s.labels.values()): s.value for s in samples}

    def at_rest(self, timeout_s: float = 30.0) -> None:
        """Wait until nothing is open and all memory is back; fails if that does not come."""
        deadline = time.monotonic() + timeout_s
        while any((found := {name: self.metrics()[name] for name in GAUGES}).values()):
            assert time.monotonic() < deadline, f"not at rest after {timeout_s:g} s: {found}"
            time.sleep(0.02)

    def offline(self, prompt: str | list[int], **params: Any) -> Any:
        """RequestOutput of the same engine in this process."""
        llm = _llm(self.chapter, tuple(sorted(self.options.items())))
        params_class = importlib.import_module(f"{self.chapter}.core").SamplingParams
        return llm.generate([prompt], params_class(**params), progress=False)[0]


@functools.lru_cache(maxsize=1)
def _llm(chapter: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return importlib.import_module(f"{chapter}.llm").LLM(**dict(options))


def running(chapter: str, *flags: str) -> Iterator[Served]:
    """The body of a fixture: a server of the tiny model in a process of its own, which ends cleanly and complained of nothing."""
    options = {"model": str(tiny_folder()), "dtype": "float32", "threads": 1, "max_model_len": MAX_MODEL_LEN}
    with Server(chapter, *tiny_flags(), *flags) as server:
        served = Served(chapter, server.url, options)
        yield served
        served.close()
        assert "Traceback" not in server.log, server.log
        assert (server.stop(), server.survivors) == (0, [])


def texts(events: list[dict[str, Any]]) -> list[str]:
    """The text of each choice of a stream."""
    out: dict[int, str] = {}
    for choice in (c for event in events for c in event["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        out[choice["index"]] = out.get(choice["index"], "") + text
    return [out[i] for i in sorted(out)]


def reasons(events: list[dict[str, Any]]) -> list[str]:
    """The finish_reason of each choice of a stream; each must have come exactly once."""
    found = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert len(dict(found)) == len(found)
    return [reason for _, reason in sorted(found)]


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@contextlib.contextmanager
def connection(url: str, body: dict[str, Any], chat: bool = False, part: float = 1.0) -> Iterator[socket.socket]:
    """A raw connection on which a request, or this part of its bytes, was sent; the end of the block hangs up."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        raw.settimeout(20)
        raw.connect((host, int(port)))
        message = head + data
        raw.sendall(message[: int(len(message) * part)])
        yield raw


def refused(served: Served, answer: Any, status: int, *words: str, param: str | None = None) -> dict[str, Any]:
    """The answer is this error in OpenAI's form, and the server still answers others as before."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    assert answer.text.isascii()
    body = answer.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error["message"]
    assert len(error["message"]) < 1000, "what was wrong is quoted, not sent back"
    if param is not None:
        assert error["param"] == param
    first = served.control = served.control or served.good(**CONTROL)["choices"]
    assert served.good(**CONTROL)["choices"] == first
    return error
