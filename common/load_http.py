"""The HTTP/1.1 client of the load runs: httptools on bare asyncio connections.

Client and server share the machine, and what the client computes is missing from the measured server: httpx takes
0.6 ms of a core for each streamed token, this 0.1 ms. It knows what a load run needs and no more: POST, keep-alive, no
proxies, no redirects.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import httptools
import httpx

from common.load_result import Exchange

Clock = Callable[[], float]
BUFFER_BYTES = 65536


class BrokenAnswer(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


class _Connection(asyncio.BufferedProtocol):
    """One connection, one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._buffer = memoryview(bytearray(BUFFER_BYTES))  # a plain Protocol gets 256 KiB of fresh memory each time
        self.idle_since = 0.0
        self.usable = True  # neither closed nor told that it will be
        self._now = 0.0
        self._until_eof = True  # neither a length nor chunks: the answer ends with the connection
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None

    async def post(self, request: bytes, x: Exchange) -> None:
        self._exchange, self._until_eof = x, True
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._done
        self.idle_since = self.clock()

    # ---- called by the loop ----

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        self._now = self.clock()
        if self._done is None or self._done.done():  # nothing was asked
            self.transport.abort()
            return
        try:
            self._parser.feed_data(self._buffer[:count])
        except httptools.HttpParserError as error:
            self._end(BrokenAnswer(f"not HTTP: {error}"))
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        begun = self._exchange is not None and self._exchange.status is not None
        complete = self._until_eof and begun and error is None
        self._end(None if complete else BrokenAnswer(str(error or "the connection was closed")))

    # ---- called by the parser ----

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_eof = False

    def on_headers_complete(self) -> None:
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        self._exchange.received.append((self._now, body))

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


class LoadClient:
    """Posts to one address. No request waits for a connection of another one: there are as many as are needed."""

    def __init__(self, url: str, path: str, headers: dict[str, str], clock: Clock, idle_s: float) -> None:
        """idle_s: a connection that has been idle for longer is not used again. ValueError for a header of two lines."""
        if any(set(value) & set("\r\n\0") for value in headers.values()):
            raise ValueError("a header, such as the API key, must be one line")
        at = httpx.URL(url)
        self._host, self._port = at.host, at.port or (443 if at.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if at.scheme == "https" else None
        lines = [f"POST {at.raw_path.decode().rstrip('/')}{path} HTTP/1.1", f"Host: {at.netloc.decode()}"]
        self._head = "\r\n".join(lines + [f"{name}: {value}" for name, value in headers.items()])
        self._clock, self._idle_s = clock, idle_s
        self._idle: list[_Connection] = []

    async def post(self, x: Exchange) -> None:
        """Send x.body and read to the end of the answer, into x.status and x.received.

        OSError without a connection, BrokenAnswer for an answer without its end. Cancelling it closes the connection.
        """
        connection = await self._connect()
        head = f"{self._head}\r\nContent-Length: {len(x.body)}\r\n\r\n".encode()
        try:
            await connection.post(head + x.body, x)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.abort()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and self._clock() - connection.idle_since < self._idle_s:
                return connection
            connection.transport.abort()
        loop = asyncio.get_running_loop()
        made = loop.create_connection(lambda: _Connection(self._clock), self._host, self._port, ssl=self._tls)
        return (await made)[1]
