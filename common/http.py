"""HTTP plumbing of the servers that no chapter teaches: sockets, bodies, disconnects, the OpenAPI form of a body."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its URL; port 0 takes a free one. OSError says which address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # now: two sockets may bind one address as long as neither listens
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    name, number = bound.getsockname()[:2]
    return bound, f"http://{f'[{name}]' if ':' in name else name}:{number}"


BODY_TIMEOUT_S = 60.0
HEAD_BYTES = 65536


class BoundedHead(HttpToolsProtocol):
    """HTTP by httptools, which takes less time than h11 but gathers the head of a request without end. After HEAD_BYTES in
    which no head was completed and no part of a body came, the connection ends, with 400 if nothing was being answered."""

    gathered = 0  # bytes received since then

    def on_headers_complete(self) -> None:
        self.gathered = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.gathered = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        self.gathered += len(data)
        super().data_received(data)
        if self.gathered > HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response("the head of the request is too long")
            self.transport.close()


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


async def when_gone(request: Request, then: Callable[[], None]) -> None:
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
