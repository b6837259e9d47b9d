"""The HTTP client of the load runs against a server of literal bytes."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.load_http import BrokenAnswer, LoadClient
from common.load_result import Exchange

PART = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


def exchange() -> Exchange:
    return Exchange(0, 1, 0.0, b'{"a": 1}')


def talk(answers: list[bytes], count: int = 1, cut: int = 1 << 20, idle_s: float = 9.0) -> tuple[list[Exchange], list]:
    """Post `count` times, one after the other, to a server that answers the n-th request of a connection with the n-th
    answer, in pieces of `cut` bytes, and hangs up after the last. Returns the exchanges and, per connection, the requests.
    """
    connections: list[list[bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got: list[bytes] = []
        connections.append(got)
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            got.append(head + await reader.readexactly(8))
            for at in range(0, len(answer), cut):
                writer.write(answer[at : at + cut])
                await asyncio.sleep(0.001)
        writer.close()

    async def run() -> list[Exchange]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = LoadClient(f"http://127.0.0.1:{port}", "/v1/completions", {"X-Key": "k"}, time.perf_counter, idle_s)
        made = [exchange() for _ in range(count)]
        try:
            for x in made:
                await client.post(x)
        finally:
            client.close()
            server.close()
        return made

    return asyncio.run(asyncio.wait_for(run(), 10)), connections


def body(x: Exchange) -> bytes:
    return b"".join(part for _, part in x.received)


def test_the_request_is_plain_http():
    (x,), ((request,),) = talk([PART])
    host = request.split(b"Host: ")[1].split(b"\r\n")[0]
    assert request == (
        b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b'\r\nX-Key: k\r\nContent-Length: 8\r\n\r\n{"a": 1}'
    )
    assert (x.status, body(x)) == (200, b"hi") and host.startswith(b"127.0.0.1:")


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_chunks_come_as_they_arrive_each_with_its_time(cut: int):
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    (x,), _ = talk([answer], cut=cut)
    times = [t for t, _ in x.received]
    assert (x.status, body(x)) == (200, b"abcde") and times == sorted(times)
    assert cut > 1 or [part for _, part in x.received] == [b"a", b"b", b"c", b"d", b"e"]


def test_a_connection_is_used_again_unless_it_was_idle_too_long_or_the_server_ends_it():
    assert [len(c) for c in talk([PART, PART], count=2)[1]] == [2]
    assert [len(c) for c in talk([PART, PART], count=2, idle_s=0.0)[1]] == [1, 1]
    last = PART.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert [len(c) for c in talk([last, PART], count=2)[1]] == [1, 1]


def test_an_answer_without_a_length_ends_with_its_connection():
    (x,), _ = talk([b"HTTP/1.1 200 OK\r\n\r\nall there is"])
    assert (x.status, body(x)) == (200, b"all there is")


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"", None), (b"HTTP/1.1 200", None), (PART[:-1], 200), (b"SSH-2.0-OpenSSH\r\n", None)],
    ids=["nothing", "half a head", "half a body", "not HTTP"],
)
def test_an_answer_without_its_end_is_an_error(answer: bytes, status: int | None):
    x = exchange()
    with pytest.raises(BrokenAnswer):
        _post(x, answer)
    assert x.status == status


def _post(x: Exchange, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await LoadClient(f"http://127.0.0.1:{port}", "/", {}, time.perf_counter, 9.0).post(x)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_header_is_one_line():
    with pytest.raises(ValueError, match="one line"):
        LoadClient("http://127.0.0.1:1", "/", {"Authorization": "Bearer a\r\nX: y"}, time.perf_counter, 9.0)
