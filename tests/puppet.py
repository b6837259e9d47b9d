"""A server in this process whose engine is a puppet: the test says what it answers and when, and sees every map."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common.checkpoints import resolve
from tests.serving import (
    MAX_MODEL_LEN,
    Served,
    tiny_folder,
)


@dataclass
class Script:
    """What the puppet answers one request; without ids it gets no token."""

    ids: list[int]
    reason: str = "length"
    cut: int | None = None


class Puppet:
    """An engine that computes nothing: each step gives every open request the next token of its script.

    ``script`` maps a Submit message to a Script. ``flow``: no tokens while it is cleared. ``broken``: what the next
    step raises. ``submitted`` and ``aborted`` tell what came.
    """

    def __init__(self, chapter: str, script: Callable[[Any], Script], pace_s: float = 0.001) -> None:
        self.chapter = chapter
        self.message = importlib.import_module(f"{chapter}.message")
        self.limits = importlib.import_module(f"{chapter}.core").Limits(max_model_len=MAX_MODEL_LEN, vocab_size=1003)
        self.names = importlib.import_module(f"{chapter}.engine").STATS
        self.script, self.pace_s = script, pace_s
        self.flow = threading.Event()
        self.flow.set()
        self.broken: Exception | None = None
        self.loading: threading.Event | None = None
        self.submitted: list[Any] = []
        self.aborted: list[int] = []
        self.called = threading.Event()
        self.tops: dict[int, dict[int, float]] = {}  # alternatives of every token of a request that wants logprobs
        self.open: dict[int, tuple[Script, int]] = {}

    def __call__(self, config: Any, tracer: Any = None) -> Puppet:
        """Stands in for the constructor of Engine."""
        self.called.set()
        if self.loading:
            self.loading.wait(30)
        if self.broken:
            raise self.broken
        return self

    def handle(self, message: Any) -> None:
        if isinstance(message, self.message.Submit):
            self.submitted.append(message)
            if message.params.logprobs is not None:
                self.tops[message.rid] = dict.fromkeys(range(300, 300 + message.params.logprobs), -2.0)
            self.open[message.rid] = self.script(message), 0
        elif isinstance(message, self.message.Abort):
            self.aborted.append(message.rid)
            self.open.pop(message.rid, None)

    def has_work(self) -> bool:
        return bool(self.open or self.broken)

    def step(self) -> list[Any]:
        if self.broken:
            raise self.broken
        time.sleep(self.pace_s)
        outs = []
        for rid, (script, at) in list(self.open.items()):
            if not (script.ids and self.flow.is_set()):
                continue
            last = at + 1 >= len(script.ids)
            finish = self.message.Finish(script.reason, script.cut) if last else None
            token, top = script.ids[at], self.tops.get(rid)
            details = None if top is None else [{"token_id": token, "logprob": -1.0, "top": top}]
            outs.append(self.message.TokensOut(rid, [token], finish, details))
            self.open[rid] = script, at + 1
            if last:
                del self.open[rid]
        return outs

    def stats(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 0) | {"running": len(self.open)}

    def close(self) -> None:
        pass


class InProcess(Served):
    """A Served whose frontend, loop and engine thread are at hand."""

    frontend: Any
    loop: asyncio.AbstractEventLoop
    engine: threading.Thread
    results: list[Any]
    thread: Any  # the HttpThread
    tasks_at_rest: int

    def tasks(self) -> int:
        """asyncio tasks that exist now."""
        future = asyncio.run_coroutine_threadsafe(_count_tasks(), self.loop)
        return future.result(10) - 1

    def forgotten(self, timeout_s: float = 20.0) -> None:
        """Wait until no map, counter, gauge or task remembers a request; fails if that does not come."""
        f, deadline = self.frontend, time.monotonic() + timeout_s
        while True:
            left = {
                "streams": f.streams,
                "last_token": f._last_token,
                "waiting": f._waiting,
                "busy": not f.idle.is_set(),
            }
            if not any(left.values()) and self.tasks() <= self.tasks_at_rest:
                return
            assert time.monotonic() < deadline, f"{left}, {self.tasks()} tasks of {self.tasks_at_rest}"
            time.sleep(0.02)


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


@contextmanager
def in_process(
    chapter: str, puppet: Puppet, folder: Path | None = None, ready: bool = True, **options: Any
) -> Iterator[InProcess]:
    """The chapter's HTTP thread with a puppet for its engine; options are fields of ServerConfig."""
    serve, frontend, config = (importlib.import_module(f"{chapter}.{n}") for n in ("serve", "frontend", "config"))
    made: list[Any] = []
    up = threading.Event()

    def keep(*args: Any) -> Any:
        made.append(frontend.Frontend(*args))
        return made[-1]

    results: list[Any] = []
    options = {"port": 0, "served_model_name": "tiny", "drain_timeout": 5.0} | options
    # The patches end before the test begins: other servers of this chapter may be started in it.
    with mock.patch.object(serve, "Frontend", keep), mock.patch.object(frontend, "Engine", puppet):
        http = serve.HttpThread(
            resolve(str(folder or tiny_folder())), frontend.Channel(), config.ServerConfig(**options)
        )
        http.on_ready = lambda url: up.set()
        engine = threading.Thread(
            target=lambda: results.append(frontend.run_engine(SimpleNamespace(), http.channel)), daemon=True
        )
        http.start()
        engine.start()
        assert puppet.called.wait(30)
    server = InProcess(chapter, http.url)
    server.frontend, server.loop, server.engine, server.results, server.thread = (
        made[0],
        http._loop,
        engine,
        results,
        http,
    )
    try:
        if ready:
            assert up.wait(30)
            server.tasks_at_rest = server.tasks()
        yield server
    finally:
        puppet.flow.set()
        if puppet.loading:
            puppet.loading.set()
        http.drain()
        http._thread.join(20)
        engine.join(20)
        server.close()
    assert not http._thread.is_alive()
    assert not engine.is_alive()
