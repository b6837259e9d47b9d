"""A process of our own that never outlives us, and frames of JSON between the two.

A child gets its orders as a line of JSON through its standard input, and ends when that closes: the kernel closes it when
the parent ends, however that happens. (PR_SET_PDEATHSIG would fire already when the thread that started the child ends.)
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def start(module: str, orders: dict[str, Any], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE`, which calls orders() first. It inherits stdout, stderr, the process group and these
    descriptors. Closing its ``stdin`` ends it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        pass_fds=tuple(descriptors),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died already; the parent will see that
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        process.stdin.flush()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it if it still runs, and forget it."""
    process.kill()
    process.wait()
    if process.stdin:
        with suppress(BrokenPipeError):  # close() flushes what a process that died at once has not read
            process.stdin.close()


def orders() -> dict[str, Any]:
    """In the child: what start() was given. From here on this process ends with its parent, and no signal that the user
    sends to the whole process group does anything: it is the parent that heeds it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            sys.exit(1)
        line += part
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return json.loads(line)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


class Frames:
    """JSON objects over a stream socket: the length in four bytes, then so many bytes of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def put(self, frame: Any) -> None:
        """OSError if nobody listens any more."""
        data = json.dumps(frame).encode()
        self._socket.sendall(len(data).to_bytes(4, "big") + data)

    def take(self, timeout: float | None = 0.0) -> list[Any]:
        """The frames that have arrived; waits up to ``timeout`` seconds (None: for ever) for the first. EOFError once
        the other side has gone and all it said has been taken."""
        frames: list[Any] = []
        while self._poll.poll(0 if frames else None if timeout is None else timeout * 1e3):
            try:
                part = self._socket.recv(1 << 20)
            except ConnectionResetError:  # it has gone without reading everything
                part = b""
            if not part:
                if frames:
                    break
                raise EOFError("the other side has gone")
            self._received += part
            while len(self._received) >= 4:
                stop = 4 + int.from_bytes(self._received[:4], "big")
                if len(self._received) < stop:
                    break
                frames.append(json.loads(self._received[4:stop]))
                del self._received[:stop]
        return frames
