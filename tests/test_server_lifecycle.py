"""How a server begins and ends: what it says meanwhile, and that no process, thread or request outlives it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from common.checkpoints import resolve
from common.http import bind
from common.service import Server
from tests.puppet import Puppet, Script, in_process
from tests.serving import (
    CONTROL,
    FRONTS,
    LARGE,
    PROCESSES,
    connection,
    tiny_flags,
    tiny_folder,
    until,
)

# ---- start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRONTS)
def test_until_the_engine_is_loaded_the_server_says_so(name: str) -> None:
    puppet = Puppet(name, lambda m: Script([5]))
    puppet.loading = threading.Event()
    with in_process(name, puppet, ready=False) as server:
        until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/health").json() == {"status": "starting"}
        answer = server.post(CONTROL)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert server.http.post("/flush_cache").status_code == (503 if name >= "ch08" else 404)
        puppet.loading.set()
        until(lambda: server.http.get("/health").status_code == 200)
        assert server.post(CONTROL).status_code == 200


@pytest.mark.parametrize("name", FRONTS)
def test_a_server_can_be_ended_while_it_loads(name: str) -> None:
    puppet = Puppet(name, lambda m: Script([5]))
    puppet.loading = threading.Event()
    with in_process(name, puppet, ready=False) as server:
        until(lambda: server.http.get("/health").status_code == 503)
        server.thread.drain()
        server.thread._thread.join(10)
        assert server.engine.is_alive(), "loading cannot be interrupted"
        puppet.loading.set()
        server.engine.join(10)
        assert server.results == [None], "what it has to say when it is loaded reaches nobody, and that is no error"


@pytest.mark.fault(27)
@pytest.mark.parametrize("name", FRONTS)
def test_two_servers_live_on_one_machine(name: str) -> None:
    puppets = [Puppet(name, lambda m, token=token: Script([token])) for token in (5, 400)]
    with in_process(name, puppets[0]) as one:
        (first,) = one.good(**CONTROL)["choices"]
        with in_process(name, puppets[1]) as two:
            (second,) = two.good(**CONTROL)["choices"]
            assert one.good(**CONTROL)["choices"] == [first]
            assert first["text"] != second["text"]


def command(name: str, *flags: str) -> None:
    """`python -m CHAPTER.serve FLAGS` in this process; signal handlers are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    serve = importlib.import_module(f"{name}.serve")
    ready = mock.patch.object(serve, "_announce", side_effect=AssertionError("it started"))
    try:
        with ready, mock.patch("sys.argv", ["serve", *flags]):
            importlib.import_module("common.cli").run_main(serve.main)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def foreign_folder(tmp_path: Path) -> str:
    """A model whose tokenizer is refused: what fails is the thread of the interface, not the engine."""
    for file in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"):
        os.symlink(tiny_folder() / file, tmp_path / file)
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("")
    return str(tmp_path)


@pytest.mark.fault(22)
@pytest.mark.parametrize("name", FRONTS)
@pytest.mark.parametrize(
    "fault", ["port in use", "bad flag", "bad value", "foreign tokenizer", "too long", "no model", "bad host"]
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    name: str, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    taken, url = bind("127.0.0.1", 0)
    port = url.rpartition(":")[2]
    flags, words = {
        "port in use": (["--port", port], ["127.0.0.1", port, "in use"]),
        "bad flag": (["--prot", "1"], ["--prot"]),
        "bad value": (["--port", "0", "--max-queue", "0"], ["max_queue"]),
        "foreign tokenizer": (["--port", "0", "--model", foreign_folder(tmp_path)], ["trust_remote_code"]),
        "too long": (["--port", "0", "--max-model-len", "5000"], ["5000", "2048"]),
        "no model": (["--port", "0", "--model", str(tmp_path / "none")], ["none"]),
        "bad host": (["--port", "0", "--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
    }[fault]
    before = threading.active_count()
    with taken, pytest.raises(SystemExit) as end:
        command(name, *["--model", str(tiny_folder()), "--dtype", "float32", "--threads", "1", *flags])
    lines = [line for line in capfd.readouterr().err.splitlines() if "rogress" not in line]
    assert end.value.code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    until(lambda: threading.active_count() <= before)


def test_no_two_sockets_can_be_bound_to_one_port() -> None:
    """Though neither is served yet: the time between is seconds long, and two servers may start at once."""
    first, url = bind("127.0.0.1", 0)
    port = int(url.rpartition(":")[2])
    with first, pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        bind("127.0.0.1", port)
    second, _ = bind("127.0.0.1", port)
    second.close()


# ---- death of the engine --------------------------------------------------------------------------------------------


@pytest.mark.fault(22)
@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("boom")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", [n for n in FRONTS if n < "ch09"])  # from ch09 on the engine is another process
def test_when_the_engine_dies_everybody_is_told_and_the_server_ends(
    name: str, error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ValueError is about options before the engine is loaded, and after that a fault like any other."""
    puppet = Puppet(name, lambda m: Script([5] * m.max_tokens), 0.01)
    serve, frontend, config = (importlib.import_module(f"{name}.{n}") for n in ("serve", "frontend", "config"))
    found: dict[str, Any] = {}

    def clients(url: str) -> None:
        body = {"prompt": "x", "max_tokens": 400}
        with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            jobs = {s: pool.submit(client.post, "/v1/completions", json=body | {"stream": s}) for s in (False, True)}
            try:
                until(lambda: all(at > 2 for _, at in puppet.open.values()) and len(puppet.open) == 2)
            finally:  # else the server would never end
                puppet.broken = error
            found.update({"stream" if s else "whole": job.result() for s, job in jobs.items()})

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with mock.patch.object(frontend, "Engine", puppet):
            options = config.ServerConfig(port=0)
            http = serve.HttpThread(resolve(str(tiny_folder())), frontend.Channel(), options)
            asking: list[threading.Thread] = []

            def ready(url: str) -> None:
                asking.append(threading.Thread(target=clients, args=(url,)))
                asking[0].start()

            http.on_ready = ready
            status = serve.serve(config.EngineConfig(model=str(tiny_folder())), http)
            asking[0].join(20)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert status == 1
    assert "Traceback" in capfd.readouterr().err
    assert found["whole"].status_code == 503
    assert "boom" in found["whole"].json()["error"]["message"]
    assert found["stream"].status_code == 200
    assert "boom" in found["stream"].text.split("data: ")[-1]
    assert "[DONE]" not in found["stream"].text


# ---- the end of the process -----------------------------------------------------------------------------------------


class Reader:
    """A client in a thread that streams one answer; ``events`` grows as they come."""

    def __init__(self, url: str, **body: Any) -> None:
        self.url, self.body = url, {"prompt": "x", "ignore_eos": True, "stream": True} | body
        self.events: list[str] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        until(lambda: len(self.events) > 3 or not self.thread.is_alive())

    def _run(self) -> None:
        try:
            with httpx.stream(
                "POST", self.url + "/v1/completions", json=self.body, timeout=60, trust_env=False
            ) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error

    def join(self) -> list[str]:
        self.thread.join(60)
        return self.events


def ended(server: Server, timeout_s: float) -> int:
    """Exit status of a server that has its signal already; nothing of it may be left."""
    assert server._process is not None
    server._process.wait(timeout_s)
    status = server.stop()
    assert server.survivors == []
    return status


@pytest.fixture(params=PROCESSES)
def front(request: pytest.FixtureRequest) -> str:
    return request.param


def test_sigterm_lets_open_streams_finish_and_takes_no_new_ones(front: str) -> None:
    with Server(front, *tiny_flags(2048)) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        reader = Reader(server.url, max_tokens=1900, stream_options={"include_usage": True})
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json() == {"status": "draining"}
        refusal = client.post("/v1/completions", json=CONTROL)
        assert (refusal.status_code, refusal.json()["error"]["type"]) == (503, "server_error")
        assert len(reader.events) < 1700, "the stream is still on: it was no test otherwise"
        events = reader.join()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 1900
        assert ended(server, 10) == 0
        assert server.log.splitlines() == [f"ready: {server.url}"]


def test_after_the_deadline_open_streams_end_with_an_error(front: str) -> None:
    """Ctrl-C goes to the whole process group."""
    with Server(front, *tiny_flags(2048), "--drain-timeout", "0.3") as server:
        reader = Reader(server.url, max_tokens=2000)
        start = time.monotonic()
        os.killpg(server.pid, signal.SIGINT)
        events = reader.join()
        assert "shutting down" in json.loads(events[-1])["error"]["message"]
        assert "[DONE]" not in events
        assert ended(server, 10) == 0
        assert server.log.splitlines() == [f"ready: {server.url}"]
        assert time.monotonic() - start < 10


def test_a_client_that_reads_nothing_does_not_keep_the_server_alive(front: str) -> None:
    puppet = Puppet(front, lambda m: Script([5] * m.max_tokens), 0.0)
    with in_process(front, puppet, drain_timeout=0.1) as server, connection(server.url, LARGE, chat=True) as raw:
        raw.recv(1000)
        until(lambda: not puppet.open)
        server.thread.drain()
        server.thread._thread.join(8)
        assert not server.thread._thread.is_alive()


def test_one_deadline_holds_for_what_is_not_answered_and_for_what_is_not_read() -> None:
    puppet = Puppet(PROCESSES[-1], lambda m: Script([5] * m.max_tokens), 0.0)
    with (
        in_process(PROCESSES[-1], puppet, drain_timeout=4.0) as server,
        connection(server.url, LARGE, chat=True) as raw,
    ):
        raw.recv(1000)
        until(lambda: not puppet.open)
        puppet.flow.clear()
        with connection(server.url, CONTROL):
            until(lambda: puppet.open)
            start = time.monotonic()
            server.thread.drain()
            server.thread._thread.join(12)
            assert 4.0 < time.monotonic() - start < 12


def test_a_second_signal_ends_at_once(front: str) -> None:
    with Server(front, *tiny_flags(2048)) as server:
        reader = Reader(server.url, max_tokens=2000)
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            os.kill(server.pid, signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503)
        assert len(reader.events) < 1900
        os.kill(server.pid, signal.SIGTERM)
        assert ended(server, 10) == 128 + signal.SIGTERM
        assert "[DONE]" not in reader.join()


@pytest.mark.fault(22)
def test_kill_leaves_no_process(front: str) -> None:
    with Server(front, *tiny_flags(2048)) as server:
        reader = Reader(server.url, max_tokens=2000)
        os.kill(server.pid, signal.SIGKILL)
        assert ended(server, 5) == -signal.SIGKILL
        reader.join()
