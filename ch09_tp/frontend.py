"""The interface side of a server: streams of open requests, and the channel to the engine.

The engine alone runs torch, and asyncio has a thread of its own. They share nothing but the two mailboxes of a Channel,
so that a process boundary can stand in its place.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from common.metrics import Metrics
from common.trace import Tracer

from .config import EngineConfig
from .core import Limits, SamplingParams
from .engine import STATS, Engine
from .message import Abort, Fatal, Finish, Message, Ready, Stats, Stop, Submit, TokensOut
from .tokenizer import Detokenizer, Tokenizer

STATS_EVERY_S = 0.1


class Mailbox:
    """One direction of a channel: any thread puts, one thread takes."""

    def __init__(self) -> None:
        self._items: deque[Message] = deque()
        self._filled = threading.Condition()
        self.on_put: Callable[[], None] | None = None  # called after each put, in the putting thread

    def put(self, messages: Sequence[Message]) -> None:
        with self._filled:
            self._items.extend(messages)
            self._filled.notify()
        if self.on_put:
            self.on_put()

    def take(self, timeout: float | None = 0.0) -> list[Message]:
        """All that is there, in order; waits up to ``timeout`` seconds (None: for ever) for the first."""
        with self._filled:
            if not self._items and timeout != 0.0:
                self._filled.wait(timeout)
            items = list(self._items)
            self._items.clear()
        return items


@dataclass
class Channel:
    """Submit, Abort, Flush and Stop one way; Ready, TokensOut, Stats and Fatal the other."""

    to_engine: Mailbox = field(default_factory=Mailbox)
    from_engine: Mailbox = field(default_factory=Mailbox)

    def put(self, message: Message) -> None:
        self.to_engine.put([message])

    def get_many(self, timeout: float | None = 0.0) -> list[Message]:
        return self.from_engine.take(timeout)


def run_engine(config: EngineConfig, channel: Channel, tracer: Tracer | None = None) -> Exception | None:
    """Load the engine and step it until Stop arrives, in the calling thread. Returns what ended it, None for Stop.

    Whatever goes wrong is told as Fatal. Requests come here checked: once the engine is loaded, an exception is our fault.
    """
    try:
        engine = Engine(config, tracer)
        gc.freeze()  # what was loaded stays: the collector need not walk half a million objects again and again
        channel.from_engine.put([Ready(asdict(engine.limits)), Stats(engine.stats())])
        try:
            _loop(engine, channel)
        except ValueError as error:  # not one about options: those were good
            raise RuntimeError(f"ValueError: {error}") from error
    except Exception as error:
        if not isinstance(error, ValueError | ConnectionError):  # bad options, or a process that it needs has gone
            traceback.print_exc()
        channel.from_engine.put([Fatal(f"{type(error).__name__}: {error}")])
        return error
    finally:
        gc.unfreeze()
    engine.close()
    return None


def _loop(engine: Engine, channel: Channel) -> None:
    told = 0.0
    while True:
        for message in channel.to_engine.take(0.0 if engine.has_work() else None):
            if isinstance(message, Stop):
                return
            engine.handle(message)
        outs: list[Message] = list(engine.step())
        # Levels are told often enough for a dashboard, and exactly when the engine comes to rest.
        if not engine.has_work() or time.perf_counter() - told > STATS_EVERY_S:
            told = time.perf_counter()
            outs.append(Stats(engine.stats()))
        channel.from_engine.put(outs)  # one wake-up per step, whatever the number of requests


@dataclass(slots=True)
class Delta:
    """What a request gained since it was last looked at."""

    text: str
    ids: list[int]
    logprobs: list[dict[str, Any]]
    finish: Finish | None


@dataclass(eq=False, slots=True)
class Stream:
    """One open request. Tokens pile up in ``pending`` until its reader comes; text is made by the reader."""

    rid: int
    prompt_ids: list[int]
    detokenizer: Detokenizer
    arrival: float  # perf_counter seconds
    filled: asyncio.Event  # set when something came into ``pending``; all streams of one call share it
    pending: list[TokensOut] = field(default_factory=list)
    started: bool = False  # has its first token
    output_tokens: int = 0
    counters: dict[str, float] = field(default_factory=dict)  # what the engine said at the end
    tracer: Tracer | None = None

    def take(self) -> Delta:
        """All that is pending, at least one message, as one Delta. The last one has ``finish``."""
        outs, self.pending = self.pending, []
        ids = [token for out in outs for token in out.ids]
        self.output_tokens += len(ids)
        text = self.detokenizer.push([token for out in outs for token in out.text_ids])
        finish = outs[-1].finish
        if finish:
            text += self.detokenizer.flush(finish.cut)
            self.counters = outs[-1].counters
        if self.tracer:
            self.tracer.emit("Detokenizer", "push", self.rid, token=ids[-1] if ids else None, text=text)
        return Delta(text, ids, [entry for out in outs for entry in out.logprobs or ()], finish)

    def count(self, name: str) -> int:
        """One of the engine's counters of this request; 0 for one that it does not have."""
        return int(self.counters.get(name, 0))


class Frontend:
    """Owns every open request of the server; all of it runs in the asyncio thread.

    ``state``: "starting", "ready", "draining", "dead". A Stream is in ``streams`` from submit() until its finish or its
    abort and nowhere else.
    """

    def __init__(self, channel: Channel, tokenizer: Tokenizer, max_queue: int, tracer: Tracer | None = None) -> None:
        self.channel, self.tokenizer, self.max_queue, self.tracer = channel, tokenizer, max_queue, tracer
        self.state = "starting"
        self.error = ""
        self.limits: Limits | None = None
        self.stats: dict[str, int] = {}
        self.streams: dict[int, Stream] = {}
        self.metrics = Metrics(STATS)
        self.idle = asyncio.Event()  # set while no request is open
        self.idle.set()
        self.ready = asyncio.Event()  # set once the engine is ready or dead
        self.dead = asyncio.Event()
        self._next_rid = 0
        self._waiting = 0  # open requests without a token
        self._last_token: dict[int, float] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From here on the engine's messages wake this loop, once per step."""

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody is left to be told
                loop.call_soon_threadsafe(self._drain)

        self.channel.from_engine.on_put = wake
        self._drain()

    def room(self, count: int) -> bool:
        """Whether count more requests may wait."""
        return self._waiting + count <= self.max_queue

    def submit(self, ids: list[int], params: SamplingParams, max_tokens: int, filled: asyncio.Event) -> Stream:
        """Hand one checked request to the engine; ``filled`` wakes its reader."""
        rid, self._next_rid = self._next_rid, self._next_rid + 1
        detokenizer = Detokenizer(self.tokenizer, ids, params.stop)
        stream = Stream(rid, ids, detokenizer, time.perf_counter(), filled, tracer=self.tracer)
        self.streams[rid] = stream
        self._waiting += 1
        self.idle.clear()
        self.metrics.open.set(len(self.streams))
        if self.tracer:
            self.tracer.emit("Frontend", "submit", rid, length=len(ids))
        self.channel.put(Submit(rid, ids, params, max_tokens))
        return stream

    def abort(self, stream: Stream, reason: str = "abort", error: str | None = None) -> None:
        """End a request from this side and tell its reader; the engine stops at the next step boundary. Idempotent.

        reason: "abort", "error" or "timeout".
        """
        if stream.rid in self.streams:
            self.channel.put(Abort(stream.rid))
            stream.pending.append(TokensOut(stream.rid, [], Finish(reason, error=error)))
            stream.filled.set()
            self._close(stream, reason)

    def fail_all(self, error: str) -> None:
        for stream in list(self.streams.values()):
            self.abort(stream, "error", error)

    def _drain(self) -> None:
        for message in self.channel.get_many():
            if isinstance(message, TokensOut):
                self._deliver(message)
            elif isinstance(message, Stats):
                self.stats = message.counters
                self.metrics.take(message.counters)
            elif isinstance(message, Ready):
                self.limits = Limits(**message.limits)
                self.state = "ready" if self.state == "starting" else self.state
                self.ready.set()
            elif isinstance(message, Fatal):
                self.state, self.error = "dead", message.error
                self.fail_all(f"the engine has died: {message.error}")
                self.ready.set()
                self.dead.set()

    def _deliver(self, out: TokensOut) -> None:
        stream = self.streams.get(out.rid)
        if stream is None:  # aborted from this side; these tokens were on their way
            return
        now = time.perf_counter()
        if out.ids and not stream.started:
            stream.started = True
            self._waiting -= 1
            self.metrics.ttft.observe(now - stream.arrival)
        elif out.ids:
            for i in range(len(out.ids)):  # those of one step arrive together
                self.metrics.itl.observe(0.0 if i else now - self._last_token[out.rid])
        self._last_token[out.rid] = now
        stream.pending.append(out)
        stream.filled.set()
        if out.finish:
            self.metrics.e2e.observe(now - stream.arrival)
            self._close(stream, out.finish.reason)

    def _close(self, stream: Stream, reason: str) -> None:
        del self.streams[stream.rid]
        self._last_token.pop(stream.rid, None)
        self._waiting -= not stream.started
        self.metrics.ended.labels(reason).inc()
        self.metrics.open.set(len(self.streams))
        if not self.streams:
            self.idle.set()
