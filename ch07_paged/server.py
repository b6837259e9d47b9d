"""The HTTP interface: routes, what guards them, and what becomes of a request before it is one."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from common.http import body_schema, chain, read_body, unless_gone, when_gone
from common.values import shown

from .config import ServerConfig
from .core import SamplingParams
from .exchange import OVERTIME, Choice, Exchange
from .frontend import Frontend
from .protocol import Answer, ApiError, Call, ChatCall, CompletionCall, bad_value, parse

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API
INLINE_CHARS = 4096  # tokenized at once, in a few milliseconds
NORMALIZED = 4  # so many characters may become one when a tokenizer normalizes them, before it looks for tokens


class Server:
    """The routes and what they share; lives in the asyncio thread."""

    def __init__(self, frontend: Frontend, config: ServerConfig, model: str, defaults: dict[str, Any]) -> None:
        """model: the name clients see; defaults: SamplingParams fields where a request is silent."""
        self.frontend, self.config, self.model, self.defaults = frontend, config, model, defaults
        # Tokenizing lets go of the interpreter lock: only other huge prompts wait for a huge one, no streams.
        self.pool = ThreadPoolExecutor(1, "tokenize")
        self.tokenizing = 0  # prompts that wait for it
        self.app = FastAPI(title="mini-sglang chapters", docs_url="/docs", redoc_url=None)
        self.app.add_exception_handler(ApiError, _api_error)
        self.app.add_exception_handler(404, _not_found)
        self.app.add_exception_handler(405, _not_found)
        self.app.add_exception_handler(Exception, _our_fault)
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/models")(self.models)
        self.app.get("/v1/models/{name:path}")(self.one_model)
        self.app.post("/v1/completions", openapi_extra=body_schema(CompletionCall))(self.completions)
        self.app.post("/v1/chat/completions", openapi_extra=body_schema(ChatCall))(self.chat_completions)

    # ---- small routes -----------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        state = self.frontend.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self) -> Response:
        return Response(self.frontend.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: Request, name: str) -> Response:
        self._authorise(request)
        self._known_model(name)
        return JSONResponse(self._model_card())

    # ---- the two that generate --------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        call = await self._admit(request, CompletionCall)
        params = call.sampling(self.defaults)
        prompts = call.prompts()
        ids = prompts if isinstance(prompts[0], list) else await self._encode(request, prompts, "prompt")
        return await self._answer(request, call, ids, params, DEFAULT_MAX_TOKENS)

    async def chat_completions(self, request: Request) -> Response:
        call = await self._admit(request, ChatCall)
        params = call.sampling(self.defaults)
        try:
            text = self.frontend.tokenizer.render_chat([m.plain() for m in call.messages])
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None
        ids = await self._encode(request, [text], "messages", special_tokens=False)
        return await self._answer(request, call, ids, params, None)

    async def _admit(self, request: Request, kind: type[Any]) -> Any:
        """Everything that can be refused before the prompt is looked at."""
        self._authorise(request)
        if self.frontend.tracer:
            self.frontend.tracer.emit("Server", "request", 0, note=request.url.path)
        state = self.frontend.state
        if state != "ready":
            raise ApiError(503, f"the server is {state}" + (f": {self.frontend.error}" if state == "dead" else ""))
        kind_of_body = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind_of_body != "application/json":
            raise ApiError(415, f"content-type must be application/json, not {shown(kind_of_body)}")
        try:
            body = await read_body(request, self.config.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        if body is None:
            message = f"the body is larger than {self.config.max_body_bytes} bytes"
            raise ApiError(413, message, headers={"Connection": "close"})
        call = parse(kind, body)
        if call.model is not None:
            self._known_model(call.model)
        if call.stream_options and call.stream_options.include_usage and not call.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
        request.state.admitted = time.perf_counter()
        return call

    async def _answer(
        self,
        request: Request,
        call: Call,
        prompts: list[list[int]],
        params: SamplingParams,
        default_max_tokens: int | None,
    ) -> Response:
        chat = isinstance(call, ChatCall)
        choices = self._submit(prompts, call.n, params, default_max_tokens, "messages" if chat else "prompt")
        include_usage = bool(call.stream_options and call.stream_options.include_usage)
        answer = Answer(self.model, chat, include_usage)
        exchange = Exchange(self.frontend, choices, answer, params.logprobs is not None, self._time_left(request))
        watcher = asyncio.create_task(when_gone(request, exchange.cancel))
        if not call.stream:
            try:
                return JSONResponse(await exchange.collect())
            finally:
                watcher.cancel()
                exchange.cancel()
        events = exchange.events(watcher)
        try:
            first = await anext(events)  # an error before the first token still gets its own status
        except BaseException:
            await events.aclose()
            raise
        return StreamingResponse(
            chain(first, events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    def _submit(
        self, prompts: list[list[int]], n: int, params: SamplingParams, default_max_tokens: int | None, field: str
    ) -> list[Choice]:
        """All choices of a call enter the queue, or none does."""
        limits = self.frontend.limits
        assert limits is not None, "a ready engine has told its limits"
        try:
            checked = [(ids, limits.check(ids, params, default_max_tokens)) for ids in prompts]
            seeds = [params.seed if params.seed is None else params.seed + i for i in range(n)]
            each = [replace(params, seed=seed) for seed in seeds]
        except ValueError as error:
            raise bad_value(error, field) from None
        if len(prompts) * n > self.config.max_queue:
            message = f"{len(prompts)} prompts with n {n} are more than the {self.config.max_queue} that may wait"
            raise ApiError(400, message, "n" if n > 1 else field)
        if self.frontend.state != "ready":  # it may have changed while the prompt was tokenized
            raise ApiError(503, f"the server is {self.frontend.state}")
        self._check_room(len(prompts) * n)
        filled = asyncio.Event()
        streams = [self.frontend.submit(ids, own, max_tokens, filled) for ids, max_tokens in checked for own in each]
        return [Choice(index, stream) for index, stream in enumerate(streams)]

    def _check_room(self, count: int) -> None:
        if not self.frontend.room(self.tokenizing + count):
            message = f"the queue is full: {self.config.max_queue} requests may wait"
            raise ApiError(429, message, headers={"Retry-After": "1"})

    async def _encode(
        self, request: Request, texts: list[str], field: str, special_tokens: bool = True
    ) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [self.frontend.tokenizer.encode(text, special_tokens) for text in texts]

        try:
            small = sum(map(len, texts)) <= INLINE_CHARS
            ids = encode() if small else await self._encode_aside(request, encode, texts)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", field) from None
        if self.frontend.tracer:
            self.frontend.tracer.emit("Tokenizer", "encode", 0, length=sum(map(len, ids)))
        return ids

    async def _encode_aside(
        self, request: Request, encode: Callable[[], list[list[int]]], texts: list[str]
    ) -> list[list[int]]:
        """encode() in the thread for huge prompts, unless it can be seen before that they do not fit, or while it waits
        its time is over or its client goes."""
        tokenizer, limits = self.frontend.tokenizer, self.frontend.limits
        assert limits is not None
        chars, most = max(map(len, texts)), limits.max_model_len
        if chars > most * tokenizer.longest_token * NORMALIZED:
            raise ValueError(f"{chars} characters are more than max_model_len {most} tokens can hold")
        self._check_room(len(texts))
        self.tokenizing += len(texts)
        try:
            work = asyncio.get_running_loop().run_in_executor(self.pool, encode)
            return await unless_gone(request, work, self._time_left(request))
        except TimeoutError:
            raise ApiError(504, OVERTIME) from None
        except ClientDisconnect:
            raise ApiError(503, "the client has gone") from None
        finally:
            self.tokenizing -= len(texts)

    def _time_left(self, request: Request) -> float:
        """Seconds until the request is overdue; 0: there is no limit."""
        limit = self.config.request_timeout
        return max(0.001, request.state.admitted + limit - time.perf_counter()) if limit else 0.0

    def _authorise(self, request: Request) -> None:
        key = self.config.api_key.encode(errors="surrogateescape")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if key and not (scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), key)):
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )

    def _known_model(self, name: str) -> None:
        if name != self.model:
            raise ApiError(404, f"model {shown(name)} is not served here; {self.model!r} is", "model")

    def _model_card(self) -> dict[str, Any]:
        limits = self.frontend.limits
        more = {"max_model_len": limits.max_model_len} if limits else {}
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "mini-sglang-chapters", **more}


# ---- plumbing -------------------------------------------------------------------------------------------------------


async def _api_error(request: Request, error: Any) -> Response:
    # json.dumps escapes to ASCII, so that an error may quote whatever was wrong.
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


async def _not_found(request: Request, error: Any) -> Response:
    wrong = "method" if error.status_code == 405 else "path"
    message = f"{request.method} {shown(request.url.path)}: no such {wrong} here"
    return await _api_error(request, ApiError(error.status_code, message, headers=error.headers))


async def _our_fault(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(500, "internal error"))
