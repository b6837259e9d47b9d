"""A server with the form of OpenAI's API and answers that a test prescribes, on a free port of this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass
class Plan:
    """What one request gets: `tokens` tokens in chunks of `per_chunk`, or something else in place of them.

    `status` other than 200: an error; `break_after`, `error_after`: after that many chunks the connection is cut, or an
    error event ends the stream; `hold`: wait for ever after the chunks; `leave_out`: "usage", "finish" or "done";
    `gate`: no text before that many answers have been open at once; `exclusive`: one answer at a time.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int | None = None
    per_chunk: int = 1
    status: int = 200
    break_after: int | None = None
    error_after: int | None = None
    hold: bool = False
    leave_out: str = ""
    words: str = "w"
    gate: int = 0
    exclusive: bool = False


@dataclass
class FakeServer:
    """`plan` maps the body of a request and its number, from 0, to its Plan; `bodies`, `arrivals`, `left` tell what came:
    bodies, seconds since the start, and the numbers of the requests whose client went away."""

    plan: Callable[[dict, int], Plan] = lambda body, i: Plan()
    bodies: list[dict] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    models_status: int = 200
    open: int = 0
    most_open: int = 0

    def __enter__(self) -> FakeServer:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(5)

    def reset(self) -> None:
        """As on the first day, for the next test, once the answers of the last one have ended."""
        deadline = time.monotonic() + 5
        while self.open and time.monotonic() < deadline:
            time.sleep(0.005)
        self.plan, self.models_status, self.most_open = lambda body, i: Plan(), 200, 0
        for seen in (self.bodies, self.arrivals, self.keys, self.left):
            seen.clear()

    def _app(self) -> FastAPI:
        app = FastAPI()
        self._one_at_a_time = asyncio.Lock()

        @app.get("/v1/models")
        async def models() -> Response:
            error = {"error": {"message": "not yet ready", "type": "server_error"}}
            return JSONResponse({"data": [{"id": "fake"}]} if self.models_status == 200 else error, self.models_status)

        @app.post("/v1/completions")
        @app.post("/v1/chat/completions")
        async def answer(request: Request) -> Response:
            body = await request.json()
            i = len(self.bodies)
            self.bodies.append(body)
            self.arrivals.append(time.perf_counter())
            self.keys.append(request.headers.get("authorization"))
            plan = self.plan(body, i)
            if plan.status != 200:
                error = {
                    "error": {"message": f"refused with\n{plan.status}", "type": "fake", "param": None, "code": None}
                }
                return JSONResponse(error, plan.status)
            return StreamingResponse(
                self._stream(i, body, plan, "chat" in request.url.path), media_type="text/event-stream"
            )

        return app

    async def _stream(self, i: int, body: dict, plan: Plan, chat: bool) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            if plan.exclusive:
                await self._one_at_a_time.acquire()
            async for event in self._events(body, plan, chat):
                yield event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left.append(i)
            raise
        finally:
            self.open -= 1
            if plan.exclusive:
                self._one_at_a_time.release()

    async def _events(self, body: dict, plan: Plan, chat: bool) -> AsyncIterator[dict | bytes]:
        tokens = plan.tokens or body.get("max_tokens") or 16
        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        while self.most_open < plan.gate:
            await asyncio.sleep(0.01)
        await asyncio.sleep(plan.first_s)
        sent = chunks = 0
        while sent < tokens:
            if chunks == plan.break_after:
                raise ConnectionAbortedError("as planned")
            if chunks == plan.error_after:
                yield {"error": {"message": "the engine died", "type": "server_error"}}
                return
            count = min(plan.per_chunk, tokens - sent)
            yield {"choices": [_choice(plan.words * count, None, chat)], "usage": None}
            sent, chunks = sent + count, chunks + 1
            await asyncio.sleep(plan.gap_s)
        if plan.hold:
            await asyncio.sleep(3600)
        if plan.leave_out != "finish":
            yield {"choices": [_choice("", "length", chat)]}
        if plan.leave_out != "usage":
            usage = {"prompt_tokens": len(body.get("prompt", "12345")), "completion_tokens": tokens}
            yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 3}}}
        if plan.leave_out != "done":
            yield b"data: [DONE]\n\n"


def _choice(text: str, finish: str | None, chat: bool) -> dict:
    said = {"delta": {"content": text} if text else {}} if chat else {"text": text}
    return {"index": 0, **said, "finish_reason": finish}
