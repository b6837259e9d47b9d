"""A server in a process group of its own, from the first line of its start to the end of its last process.

with Server("ch05_serving", "--model", "smollm2-135m") as server:
    load(server.url, workload)
    status = server.stop()
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

from common.harness import ROOT, STDERR_LINES

READY = re.compile(r"(?:^|[\r\n])ready: (https?://\S+)[ \t]*\r?\n")  # with the line's end: the url is whole
POLL_S = 0.05
GRACE_S = 1.0


class ServerError(RuntimeError):
    """The server did not start, died, or did not end in time; the message ends with the tail of what it wrote."""


class Server:
    """`python -m CHAPTER.serve --port 0 FLAGS`, ready to answer on entry and gone, with all its children, on exit.

    Ready means: the line `ready: URL` came on stderr and URL/health answers 200. `timeout_s` bounds the start, loading
    the model included. `url` and `pid` are set on entry.
    """

    def __init__(self, chapter: str, *flags: str, timeout_s: float = 300.0, env: dict[str, str] | None = None):
        self.command: list[str] = [sys.executable, "-m", f"{chapter}.serve", "--port", "0", *flags]
        self.name, self.timeout_s, self.health = f"{chapter}.serve", timeout_s, "/health"
        self.env = {**os.environ, **(env or {})}
        self.url, self.pid = "", 0
        self.survivors: list[int] = []
        self._gone = False
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        url: str = "",
        *,
        health: str = "/health",
        timeout_s: float = 600.0,
        env: dict[str, str] | None = None,
    ) -> Server:
        """Any other server: `command` as it is. With a `url` no line `ready:` is awaited, only url + health."""
        server = cls("", timeout_s=timeout_s, env=env)
        server.command, server.name = list(command), Path(command[0]).name
        server.url, server.health = url.rstrip("/"), health
        return server

    def __enter__(self) -> Server:
        # A file, not a pipe: a server never waits for us to read, and the end of a long log is there when it is needed.
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self.env,
                start_new_session=True,
            )
            self.pid = self._process.pid
            self._await_ready(time.monotonic() + self.timeout_s)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self._tail("wrote at last:"))
        try:
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ServerError):
                    self.stop(timeout_s=10.0)
        finally:
            self._end()

    @property
    def log(self) -> str:
        """What the server wrote so far to stdout and stderr. Empty after exit."""
        if self._log.closed:
            return ""
        # pread leaves the offset alone, which is the server's too.
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send the signal to the server's first process and wait. Returns its exit status, -N if signal N ended it.

        Afterwards `survivors` are the processes of its group that it left behind for more than a second; they are
        killed. ServerError if it has not ended in time; then the whole group is killed. A second call returns the same
        status.
        """
        process = self._process
        if process is None:
            raise ServerError(f"{self.name} is not running")
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                text = self._tail(f"did not end within {timeout_s:g} s after {how.name}")
                self._kill()
                raise ServerError(text) from None
        if not self._gone:
            self.survivors = self._outlast()
        self._kill()
        return process.wait()

    def _await_ready(self, deadline: float) -> None:
        assert self._process is not None
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while True:
                if (status := self._process.poll()) is not None:
                    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                    raise ServerError(self._tail(f"ended before it was ready ({how})"))
                if not self.url and (found := READY.search(self.log)):
                    self.url = found[1].rstrip("/")
                if self.url:
                    with contextlib.suppress(httpx.HTTPError):
                        if client.get(self.url + self.health).status_code == 200:
                            return
                if time.monotonic() > deadline:
                    raise ServerError(self._tail(f"was not ready within {self.timeout_s:g} s"))
                time.sleep(POLL_S)

    def _tail(self, what: str) -> str:
        return "\n    ".join([f"{self.name} {what}", *self.log.splitlines()[-STDERR_LINES:]])

    def _kill(self) -> None:
        if self._gone or self._process is None:  # only once: later the number may be that of others
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._outlast()  # the signal is on its way to the children still
        self._gone = True

    def _outlast(self) -> list[int]:
        """Wait for the group to be empty, for a short time; returns who is left."""
        deadline = time.monotonic() + GRACE_S
        while (left := group(self.pid)) and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        return left

    def _end(self) -> None:
        self._kill()
        self._process = None
        self._log.close()


def group(pgid: int) -> list[int]:
    """Processes of a group that are alive, zombies not counted. Empty where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; the fields after it are state, parent, group.
            state, _, owner = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(owner) == pgid and state not in "ZX":
            found.append(int(stat.parent.name))
    return found
