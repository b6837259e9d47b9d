"""Server: ready when it says so, gone with all its children, and its last words in every error."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from common import child, service
from common.service import Server, ServerError, group

FAKE = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

trick = sys.argv[sys.argv.index("--trick") + 1] if "--trick" in sys.argv else ""
calls = 0

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global calls
        calls += 1
        self.send_response(503 if calls < 3 else 200)
        self.end_headers()
        self.wfile.write(" ".join(sys.argv[1:]).encode())

    def log_message(self, *args):
        pass

print("loading", file=sys.stderr, flush=True)
if trick == "refuse":
    sys.exit("error: no such model")
if trick == "hang":
    time.sleep(600)
if trick == "orphan":
    subprocess.Popen(["sleep", "600"])
server = HTTPServer(("127.0.0.1", 0), Handler)
def stop(*_):
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN if trick == "deaf" else stop)
print(f"progress 50 %\\rready: http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment in which chapter `chxx_fake` has a server."""
    monkeypatch.setattr(service, "GRACE_S", 0.5)
    (tmp_path / "chxx_fake").mkdir()
    (tmp_path / "chxx_fake" / "serve.py").write_text(FAKE)
    return {"PYTHONPATH": str(tmp_path)}


def test_a_server_is_ready_once_health_says_so_and_stops_with_its_status(fake: dict[str, str]):
    with Server("chxx_fake", "--model", "m", env=fake, timeout_s=20) as server:
        answer = httpx.get(server.url, trust_env=False)  # two 503 were waited out
        assert (answer.status_code, answer.text) == (200, "--port 0 --model m")
        assert group(server.pid) == [server.pid] and "loading" in server.log
        assert server.stop() == 7 and server.stop() == 7
        assert server.survivors == [] and group(server.pid) == []


def test_children_that_a_server_leaves_behind_are_told_and_killed(fake: dict[str, str]):
    with Server("chxx_fake", "--trick", "orphan", env=fake, timeout_s=20) as server:
        server.stop()
        assert len(server.survivors) == 1 and group(server.pid) == []


def test_leaving_the_block_ends_everything_also_after_an_error(fake: dict[str, str]):
    with pytest.raises(ZeroDivisionError) as error, Server("chxx_fake", "--trick", "orphan", env=fake) as server:
        raise ZeroDivisionError
    assert group(server.pid) == [] and "loading" in error.value.__notes__[0]


def test_a_server_that_dies_at_the_start_is_an_error_with_its_words(fake: dict[str, str]):
    with pytest.raises(
        ServerError, match=r"chxx_fake.serve ended before it was ready \(exit status 1\)[^$]*no such model"
    ):
        Server("chxx_fake", "--trick", "refuse", env=fake, timeout_s=20).__enter__()


def test_a_server_that_is_never_ready_is_killed_in_time(fake: dict[str, str]):
    server, started = Server("chxx_fake", "--trick", "hang", env=fake, timeout_s=0.5), time.monotonic()
    with pytest.raises(ServerError, match=r"was not ready within 0.5 s"):
        server.__enter__()
    assert time.monotonic() - started < 10 and group(server.pid) == []


def test_a_server_that_does_not_heed_the_signal_is_killed(fake: dict[str, str]):
    with Server("chxx_fake", "--trick", "deaf", env=fake, timeout_s=20) as server:
        with pytest.raises(ServerError, match=r"did not end within 0.3 s after SIGTERM"):
            server.stop(timeout_s=0.3)
        assert group(server.pid) == [] and server.stop() == -signal.SIGKILL


def test_any_other_server_is_polled_at_its_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"from http.server import *; HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"
    with Server.of(
        [sys.executable, "-c", code], f"http://127.0.0.1:{port}/", health="/LICENSE", timeout_s=20
    ) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        assert server.stop() == -signal.SIGTERM


def test_a_child_that_died_before_it_read_its_orders_is_ended_quietly(monkeypatch):
    """Its orders lie in a buffer that nobody will read, and closing the pipe tries to send them once more."""

    class Dead(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.kill()
            self.wait()

    monkeypatch.setattr(child.subprocess, "Popen", Dead)
    process = child.start("common.doctor", {"config": {}})
    child.end(process)
    assert process.returncode == -signal.SIGKILL and process.stdin.closed
