"""The terminal chat: what it sends, what it keeps, and how it behaves in a pipe, in a terminal, and when things go wrong."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.api import ApiError
from common.chat import Chat, run
from tests.fake_server import FakeServer, Plan

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.reset()
    return running


@pytest.fixture
def chat(server: FakeServer) -> Iterator[Chat]:
    with httpx.Client(trust_env=False) as client:
        yield Chat(client, server.url, {"max_tokens": 3})


def talk(chat: Chat, *lines: str, interactive: bool = False) -> tuple[str, str]:
    """What stands on stdout and on stderr after these lines."""
    out, err = io.StringIO(), io.StringIO()
    run(chat, iter(f"{line}\n" for line in lines), out, err, interactive)
    return out.getvalue(), err.getvalue()


def messages(*texts: str) -> list[dict[str, str]]:
    """user, assistant, user, …"""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# ---- the conversation -----------------------------------------------------------------------------------------------


def test_the_conversation_is_kept_and_sent_with_each_question(chat: Chat, server: FakeServer):
    out, _ = talk(chat, "one", "", "two")
    assert out == "www\nwww\n"
    assert [b["messages"] for b in server.bodies] == [messages("one"), messages("one", "www", "two")]
    assert server.bodies[0]["stream"] and server.bodies[0]["stream_options"] == {"include_usage": True}
    assert server.bodies[0]["max_tokens"] == 3 and "model" not in server.bodies[0]


def test_commands_set_the_system_message_and_forget(chat: Chat, server: FakeServer):
    out, err = talk(
        chat, "/system Be brief.", "one", "/reset", "two", "/system", "/nonsense", "/help", "three", "/quit", "four"
    )
    system = {"role": "system", "content": "Be brief."}
    asked = [b["messages"] for b in server.bodies]
    assert asked == [[system, *messages("one")], [system, *messages("two")], messages("two", "www", "three")]
    assert out == "www\n" * 3 and "unknown command /nonsense" in err and "/reset" in err


def test_a_line_about_usage_and_speed_follows_each_answer(chat: Chat, server: FakeServer):
    server.plan = lambda body, i: Plan(first_s=0.1, gap_s=0.05, per_chunk=1)
    _, err = talk(chat, "one")
    assert err.startswith("[5 prompt (3 cached) + 3 output tokens, length; first token ") and "ms per token" in err
    first, each = (float(err.split(mark)[1].split(" ms")[0]) for mark in ("first token ", "then "))
    assert 100 <= first < 20_000 and 0 < each < 5000


def test_no_speed_is_told_where_it_was_not_measured(chat: Chat, server: FakeServer):
    server.plan = lambda body, i: Plan(per_chunk=3)
    assert "per token" not in talk(chat, "one")[1]


def test_an_answer_is_shown_piece_by_piece(chat: Chat, server: FakeServer):
    server.plan = lambda body, i: Plan(hold=True)
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt  # the stream is still open: the pieces did not wait for its end

    answer = chat.ask("one", show)
    assert pieces == ["w", "w", "w"] and answer.stopped


def test_a_stopped_answer_is_kept_and_its_stream_closed(chat: Chat, server: FakeServer):
    server.plan = lambda body, i: Plan(hold=i == 0)
    said = []

    def show(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt

    assert chat.ask("one", show).summary().startswith("[stopped; first token ")
    deadline = time.monotonic() + 5
    while server.left != [0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.left == [0]
    chat.ask("two", lambda text: None)
    assert server.bodies[1]["messages"] == messages("one", "ww", "two")


def test_a_question_stopped_before_any_answer_is_not_kept(
    chat: Chat, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object) -> Iterator[str]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Chat, "_pieces", interrupted)
    assert chat.ask("one", lambda text: None).stopped and chat.messages == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(status=429), "429: refused with 429"),
        (Plan(status=500), "500: refused with 500"),
        (Plan(error_after=1), "the engine died"),
        (Plan(break_after=1), "the answer broke off (RemoteProtocolError)"),
        (Plan(leave_out="done"), "the answer broke off"),
    ],
)
def test_an_error_is_one_line_and_its_question_is_not_kept(chat: Chat, server: FakeServer, plan: Plan, message: str):
    server.plan = lambda body, i: plan if i == 0 else Plan()
    _, err = talk(chat, "one", "two", interactive=True)
    assert f"error: {message} (the question was not kept)\n" in err
    assert server.bodies[1]["messages"] == messages("two")
    server.bodies.clear()
    with pytest.raises(ApiError):
        talk(chat, "one", "two")
    assert len(server.bodies) == 1


def test_what_a_model_says_does_not_steer_the_terminal(chat: Chat, server: FakeServer):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    server.plan = lambda body, i: Plan(words="é\x1b[2J\x07\t\n")
    out = Terminal()
    run(chat, iter(["one"]), out, io.StringIO(), True)
    assert out.getvalue() == "é[2J\t\n" * 3


# ---- the command ----------------------------------------------------------------------------------------------------


def command(stdin: str, *args: str) -> subprocess.CompletedProcess[str]:
    done = [sys.executable, "-m", "common.chat", *args]
    return subprocess.run(done, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=60)


def test_a_pipe_gets_the_answers_and_nothing_else(server: FakeServer):
    flags = ["--system", "S", "--temperature", "0", "--max-tokens", "2", "--api-key", "k"]
    done = command("one\ntwo", "--url", f"{server.url}/v1/", *flags)
    assert (done.returncode, done.stdout) == (0, "ww\nww\n")
    assert done.stderr.count("\n") == 2 and "\x1b" not in done.stderr
    body = server.bodies[1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("fake", 0, 2)
    assert body["messages"] == [{"role": "system", "content": "S"}, *messages("one", "ww", "two")]
    assert server.keys == ["Bearer k"] * 2


def test_what_is_wrong_is_one_line_and_status_2(server: FakeServer):
    server.plan = lambda body, i: Plan(status=429)
    for args, text in (
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9 "),
        (["--max-tokens", "0"], "at least 1"),
        (["--timeout", "inf"], "at most 1,000,000 seconds"),
        (["--url", server.url], "429: refused with 429"),
    ):
        done = command("one\ntwo\n", *args)
        assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1, done.stderr
    server.models_status = 503
    done = command("one\n", "--url", server.url)
    assert (done.returncode, done.stderr) == (2, "error: 503: not yet ready\n")


def _read_until(terminal: int, text: str) -> str:
    seen, deadline = "", time.monotonic() + 20
    while text not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 1).decode()  # nothing beyond the text, for the next to read
    assert text in seen, seen
    return seen


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(server: FakeServer):
    server.plan = lambda body, i: Plan(tokens=3, hold=i == 0)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "common.chat", "--url", server.url]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    try:
        os.close(theirs)
        _read_until(ours, "> ")
        os.write(ours, b"one\n")
        _read_until(ours, "www")
        process.send_signal(signal.SIGINT)
        assert "\x1b[2m[stopped; first token" in _read_until(ours, "> ")
        time.sleep(0.2)  # readline takes a signal from when it waits for a key, which is not told
        process.send_signal(signal.SIGINT)
        _read_until(ours, "ends)")  # with nothing to stop, it only empties the line
        _read_until(ours, "> ")
        os.write(ours, b"two\n")
        assert "3 output tokens" in _read_until(ours, "> ")
        os.write(ours, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert server.bodies[1]["messages"] == messages("one", "www", "two")
