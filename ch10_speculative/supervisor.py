"""The processes of a server: one that talks HTTP, and one per rank, watched from the first.

The main thread of the HTTP process is the supervisor: it passes on what rank 0 says and looks after all ranks of its
host. If one dies, the clients are told and the others are ended. Rank processes end when the supervisor does.
"""

from __future__ import annotations

import bisect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from common import child
from common.cli import one_line
from common.trace import Event, Tracer

from .config import EngineConfig
from .distributed import GRACE_S, LEAVE_S, LOST, Place, RankError, Ranks
from .engine import Engine
from .frontend import Channel, Mailbox, run_engine
from .message import Fatal, Message, Stop

POLL_S = 0.2
IDLE_S = 1.0  # between two looks of an idle rank 0 at the others
LAST_WORDS_S = 2.0  # how long rank 0 may take to say what went wrong once some rank has ended


class Wire(Mailbox):
    """One end of a socket in place of both mailboxes of a channel; each put is one frame."""

    def __init__(
        self, end: socket.socket, told: Tracer | None = None, heard: Tracer | None = None, patience: float | None = None
    ) -> None:
        """told: its events leave with the next frame; heard: takes those that come. patience: seconds after which take()
        gives up waiting for ever."""
        super().__init__()
        self._frames, self._told, self._heard, self._patience = child.Frames(end), told, heard, patience

    def put(self, messages: Sequence[Message]) -> None:
        events: list[Event] = []
        if self._told:
            events, self._told.events = self._told.events, events
        self._frames.put([[message.to_dict() for message in messages], [asdict(event) for event in events]])

    def take(self, timeout: float | None = 0.0) -> list[Message]:
        """As Mailbox.take; Stop once the other side has gone."""
        try:
            frames = self._frames.take(self._patience if timeout is None else timeout)
        except EOFError:
            return [Stop()]
        if self._heard:
            for event in (Event(**fields) for _, events in frames for fields in events):
                bisect.insort(self._heard.events, event, key=lambda event: event.t)
                self._heard.step = event.step
        return [Message.from_dict(data) for messages, _ in frames for data in messages]


def supervise(config: EngineConfig, channel: Channel, tracer: Tracer | None = None) -> Exception | None:
    """Run the engine in processes of its own until Stop arrives or one of them ends. As run_engine: returns what ended
    it, None for Stop, and tells whatever goes wrong as Fatal. No process of the group is left on this host."""
    ours, theirs = socket.socketpair()
    wire, stopping = Wire(ours, heard=tracer), threading.Event()
    place = Place.of(config)
    try:
        ranks = Ranks(config, place, place.rank, theirs.fileno(), tracer.start if tracer else None)
    except ValueError as error:
        channel.from_engine.put([Fatal(str(error))])
        return error
    finally:
        theirs.close()
    threading.Thread(target=_forward, args=(channel.to_engine, wire, stopping), daemon=True).start()
    try:
        last_words = _pass_on(wire, ranks, channel, stopping)
        ended = None if stopping.is_set() else _verdict(ranks, last_words)
    finally:
        ranks.close(GRACE_S if stopping.is_set() else 0.0)
        ours.close()
    if ended:
        channel.from_engine.put([Fatal(str(ended))])
    return ended


def _forward(outgoing: Mailbox, wire: Wire, stopping: threading.Event) -> None:
    """Pass on what the interface says to rank 0, in a thread of its own: a busy engine must not hold up the HTTP side."""
    with suppress(OSError):
        while not stopping.is_set():
            messages = outgoing.take(None)
            if any(isinstance(message, Stop) for message in messages):
                stopping.set()
            wire.put(messages)


def _pass_on(wire: Wire, ranks: Ranks, channel: Channel, stopping: threading.Event) -> str:
    """Pass on what rank 0 says until it ends, or some rank has and rank 0 had the time to say why, or the group had its
    time to stop. Returns rank 0's last words."""
    last_words, deadline, ended = "", float("inf"), False
    while not ended and time.monotonic() < deadline:
        messages = wire.take(POLL_S)
        last_words = next((m.error for m in messages if isinstance(m, Fatal)), last_words)
        ended = any(isinstance(m, Stop) for m in messages)
        if passed := [m for m in messages if not isinstance(m, Fatal | Stop)]:
            channel.from_engine.put(passed)
        if stopping.is_set():
            deadline = min(deadline, time.monotonic() + GRACE_S)
        elif ranks.culprit():
            deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
    return last_words


def _verdict(ranks: Ranks, last_words: str) -> Exception:
    """What went wrong: rank 0's last words if it failed by itself, else which rank ended and how."""
    if last_words or not ranks.culprit():  # rank 0 is about to exit, and its status tells whose fault it was
        with suppress(subprocess.TimeoutExpired):
            ranks.processes[0].wait(LAST_WORDS_S)
    rank, status = ranks.culprit() or (0, LOST)
    if rank == 0 and status == 2:
        return ValueError(last_words.partition(": ")[2])
    if rank == 0 and last_words:
        return RuntimeError(last_words)
    try:
        ranks.check()
    except RankError as error:
        return error
    return RankError("rank 0 does not answer")


def attend(config: EngineConfig) -> int:
    """Run the ranks of a host without rank 0 until the group ends. Returns the exit status.

    A signal is for rank 0 to heed, which lets open requests finish; a second one, or LEAVE_S without an end, ends them.
    """
    place = Place.of(config)
    try:
        socket.getaddrinfo(place.address, place.port)
    except OSError as error:
        raise ValueError(f"master_addr {place.address}: {error.strerror or error}") from None
    ranks = Ranks(config, place, first=place.rank)
    if config.nnodes > 1:
        said = f"waiting for rank 0 at {place.address}:{place.port}, which ends this host too; so does a second Ctrl-C"
        print(said, file=sys.stderr, flush=True)
    signals: list[float] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: signals.append(time.monotonic()))
    try:
        while not ranks.wait(0.2):
            late = len(signals) > 1 or (signals and time.monotonic() > signals[0] + LEAVE_S)
            if late or any(process.poll() for process in ranks.processes.values()):
                break
        rank, status = ranks.culprit() or (0, 1)
        if status < 0:  # who ends by itself has said why
            print(f"error: rank {rank} ended with signal {signal.Signals(-status).name}", file=sys.stderr, flush=True)
        return int(status != 0)
    finally:
        ranks.close()


def main() -> int:
    """A process that is one rank, as its orders say, until the group stops."""
    orders = child.orders()
    config = EngineConfig(**orders["config"])
    config.place = place = Place(**orders["place"])
    error: Exception | None = None
    if place.wire >= 0:
        tracer = None if orders["trace"] is None else Tracer(start=orders["trace"])
        wire = Wire(socket.socket(fileno=place.wire), told=tracer, patience=IDLE_S if place.size > 1 else None)
        error = run_engine(config, Channel(wire, wire), tracer)
    else:
        try:
            Engine(config).runner.follow()
        except (ValueError, RankError) as problem:
            error, said = problem, one_line(problem)
            if isinstance(problem, ValueError):
                time.sleep(GRACE_S)  # rank 0, if it has the same problem, tells it and ends this process
                said = f"rank {place.rank}: {said}"
            print(f"error: {said}", file=sys.stderr, flush=True)
    return 0 if error is None else LOST if isinstance(error, RankError) else 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the interpreter's own end takes its time, and waits for what is left of dead groups
