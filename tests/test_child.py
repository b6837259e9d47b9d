"""Frames of JSON between two processes, however the socket cuts them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from common.child import Frames


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def test_frames_come_whole_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(Frames, ends)
    for i in range(3):
        a.put({"i": i})
    assert b.take() == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert b.take() == []
    b.put([])
    assert a.take() == [[]]


def test_a_frame_in_pieces_waits_for_its_rest(ends: tuple[socket.socket, socket.socket]) -> None:
    """Cut after every byte: in the length, at its end, in the JSON."""
    left, right = ends
    data = b'{"text": "\\u00e9"}'
    message = len(data).to_bytes(4, "big") + data
    frames = Frames(right)
    for cut in range(1, len(message)):
        left.sendall(message[:cut])
        assert frames.take() == []
        left.sendall(message[cut:] + message[:2])
        assert frames.take() == [{"text": "é"}]
        left.sendall(message[2:])
        assert frames.take() == [{"text": "é"}]


def test_a_frame_that_is_larger_than_any_buffer(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = map(Frames, ends)
    large = ["x" * 1000] * 8000
    sender = threading.Thread(target=a.put, args=(large,), daemon=True)
    sender.start()
    found: list[object] = []
    deadline = time.monotonic() + 30
    while not found and time.monotonic() < deadline:
        found += b.take(1.0)
    sender.join(10)
    assert found == [large]


def test_what_was_said_before_the_end_is_heard_first(ends: tuple[socket.socket, socket.socket]) -> None:
    left, right = ends
    a, b = Frames(left), Frames(right)
    a.put("last words")
    left.close()
    assert b.take(None) == ["last words"]
    with pytest.raises(EOFError):
        b.take(None)
    with pytest.raises(OSError):
        for _ in range(3):
            b.put("to nobody")
