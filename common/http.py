"""HTTP plumbing of the servers that no chapter teaches: sockets, bodies, disconnects, the OpenAPI form of a body."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its URL; port 0 takes a free one. OSError says which address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()  # now: two sockets may bind one address as long as neither listens
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    name, number = bound.getsockname()[:2]
    return bound, f"http://{f'[{name}]' if ':' in name else name}:{number}"


BODY_TIMEOUT_S = 60.0
HEAD_BYTES = 65536
PIPELINED = 8  # requests of one connection that are read before the first is answered
UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class BoundedHead(HttpToolsProtocol):
    """HTTP by httptools, which takes less time than h11 but leaves four things to be looked after:

    - It gathers the head of a request without end. After HEAD_BYTES in which no head was completed and no part of a body
      came, the connection ends, with 400 if nothing was being answered; and after BODY_TIMEOUT_S without a complete head.
    - uvicorn reads nothing while a pipelined request waits, and so does not see that the client hangs up: here it reads on.
    - A connection that is lost is told to its last request only: here to all.
    - A request that offers to upgrade (to HTTP/2, as Java's client does) loses its body: here the offer is passed over.
    """

    gathered = 0  # bytes received since a head was completed or a part of a body came
    in_head = True
    late: asyncio.TimerHandle | None = None  # until the head is complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.open: list[RequestResponseCycle] = []  # requests that are not answered yet
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        for cycle in self.open:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self.in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.gathered = 0
        self.in_head = False
        self._head_is_here()
        super().on_headers_complete()
        self.open = [cycle for cycle in self.open if not cycle.response_complete] + [self.cycle]
        if 1 < len(self.open) <= PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self.gathered = 0
        if self.cycle.response_complete:  # who was answered before may send the rest, which nobody reads, for a while
            self._wait_for_head()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.in_head = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self.gathered += len(data)
        if self.in_head:
            self._wait_for_head()
            head, gap, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nx-upgrade:", head) + gap + rest
        super().data_received(data)
        if self.gathered > HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response("the head of the request is too long")
            self.transport.close()

    def _wait_for_head(self) -> None:
        if self.late is None:
            self.late = self.loop.call_later(BODY_TIMEOUT_S, self._head_is_late)

    def _head_is_here(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def _head_is_late(self) -> None:
        self.late = None
        if all(cycle.response_complete for cycle in self.open):
            self.transport.close()


T = TypeVar("T")


async def unless_gone(request: Request, work: asyncio.Future[T], timeout_s: float) -> T:
    """What work results in. It is cancelled when the client hangs up (ClientDisconnect) or after timeout_s seconds, 0 for
    no limit (TimeoutError)."""
    watcher = asyncio.create_task(when_gone(request, work.cancel))
    try:
        async with asyncio.timeout(timeout_s or None):
            return await work
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def read_body(request: Request, limit: int, timeout_s: float | None = None) -> bytes | None:
    """The whole body; None if it is longer than limit bytes, told or chunked, or if the client has gone.

    TimeoutError if it does not arrive within timeout_s (None: BODY_TIMEOUT_S): who sends a byte now and then would hold a
    connection for ever.
    """
    with suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > limit:
            return None
    parts: list[bytes] = []
    size = 0
    with suppress(ClientDisconnect):
        async with asyncio.timeout(BODY_TIMEOUT_S if timeout_s is None else timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    return None
                parts.append(part)
        return b"".join(parts)
    return None


async def when_gone(request: Request, then: Callable[[], object]) -> None:
    """Call ``then`` when the client hangs up. The body has been read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    then()


async def chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """first and then the rest, which is closed whatever happens."""
    try:
        yield first
        async for part in rest:
            yield part
    finally:
        await rest.aclose()


def body_schema(model: Any) -> dict[str, Any]:
    """``openapi_extra`` for a route that reads a body of this pydantic model itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, part in schema.pop("$defs", {}).items():
        reference = json.dumps({"$ref": f"#/components/schemas/{name}"})
        schema = json.loads(json.dumps(schema).replace(reference, json.dumps(part)))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
