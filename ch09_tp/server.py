"""The HTTP interface: routes, what guards them, and how an answer is streamed, timed and cancelled."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response, StreamingResponse

from common.http import body_schema, chain, read_body, when_gone
from common.values import shown

from .config import ServerConfig
from .core import SamplingParams
from .frontend import Delta, Frontend, Stream
from .message import Flush
from .protocol import (
    Answer,
    ApiError,
    Call,
    ChatCall,
    CompletionCall,
    bad_value,
    chat_logprobs,
    completion_logprobs,
    parse,
    usage,
)

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as in OpenAI's API
INLINE_CHARS = 4096  # tokenized at once, in a few milliseconds


@dataclass(slots=True)
class Choice:
    """One answer of a call: a stream, and what has been read from it."""

    index: int
    stream: Stream
    token_chars: int = 0  # of the texts of the tokens it has
    begun: bool = False


class Server:
    """The routes and what they share; lives in the asyncio thread."""

    def __init__(self, frontend: Frontend, config: ServerConfig, model: str, defaults: dict[str, Any]) -> None:
        """model: the name clients see; defaults: SamplingParams fields where a request is silent."""
        self.frontend, self.config, self.model, self.defaults = frontend, config, model, defaults
        # Tokenizing lets go of the interpreter lock: a huge prompt costs this thread, not the streams of others, and
        # only other huge ones wait for it.
        self.pool = ThreadPoolExecutor(1, "tokenize")
        self.app = FastAPI(title="mini-sglang chapters", docs_url="/docs", redoc_url=None)
        self.app.add_exception_handler(ApiError, _api_error)
        self.app.add_exception_handler(404, _not_found)
        self.app.add_exception_handler(405, _not_found)
        self.app.add_exception_handler(Exception, _our_fault)
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(self.metrics)
        self.app.post("/flush_cache")(self.flush_cache)
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

    async def flush_cache(self, request: Request) -> Response:
        self._authorise(request)
        if self.frontend.state != "ready":
            raise ApiError(503, f"the server is {self.frontend.state}")
        self.frontend.channel.put(Flush())  # in its turn: after what was submitted, before what will be
        return JSONResponse({"status": "flushed what no running request uses"})

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
        ids = prompts if isinstance(prompts[0], list) else await self._encode(prompts, "prompt")
        return await self._answer(request, call, ids, params, DEFAULT_MAX_TOKENS)

    async def chat_completions(self, request: Request) -> Response:
        call = await self._admit(request, ChatCall)
        params = call.sampling(self.defaults)
        try:
            text = self.frontend.tokenizer.render_chat([m.plain() for m in call.messages])
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None
        ids = await self._encode([text], "messages", special_tokens=False)
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
        if call.stream_options is not None and not call.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
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
        exchange = Exchange(self.frontend, choices, answer, params.logprobs is not None, self.config.request_timeout)
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
        if not self.frontend.room(len(prompts) * n):
            message = f"the queue is full: {self.config.max_queue} requests may wait"
            raise ApiError(429, message, headers={"Retry-After": "1"})
        filled = asyncio.Event()
        streams = [self.frontend.submit(ids, own, max_tokens, filled) for ids, max_tokens in checked for own in each]
        return [Choice(index, stream) for index, stream in enumerate(streams)]

    async def _encode(self, texts: list[str], field: str, special_tokens: bool = True) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [self.frontend.tokenizer.encode(text, special_tokens) for text in texts]

        try:
            small = sum(map(len, texts)) <= INLINE_CHARS
            ids = encode() if small else await asyncio.get_running_loop().run_in_executor(self.pool, encode)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", field) from None
        if self.frontend.tracer:
            self.frontend.tracer.emit("Tokenizer", "encode", 0, length=sum(map(len, ids)))
        return ids

    def _authorise(self, request: Request) -> None:
        key = self.config.api_key
        given = request.headers.get("authorization", "")
        if key and not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {key}".encode()):
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


class Exchange:
    """Reads all choices of one call to their ends, within the time limit; cancel() from anywhere ends it early."""

    def __init__(
        self, frontend: Frontend, choices: list[Choice], answer: Answer, logprobs: bool, timeout_s: float
    ) -> None:
        """timeout_s: 0 for no limit."""
        self.frontend, self.choices, self.answer, self.logprobs = frontend, choices, answer, logprobs
        self.filled = choices[0].stream.filled  # of all of them
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(timeout_s, self.cancel, "timeout") if timeout_s else None

    def cancel(self, reason: str = "abort") -> None:
        """Abort what is still open; readers see it end. Idempotent."""
        if self.timer:
            self.timer.cancel()
        for choice in self.choices:
            self.frontend.abort(choice.stream, reason)

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        texts = ["" for _ in self.choices]
        entries: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        reasons = ["" for _ in self.choices]
        async for choice, delta in self._deltas():
            texts[choice.index] += delta.text
            entries[choice.index] += delta.logprobs
            if delta.finish:
                reasons[choice.index] = delta.finish.reason
        made = [
            self.answer.choice(c.index, texts[c.index], self._logprobs(entries[c.index], 0), reasons[c.index])
            for c in self.choices
        ]
        return self.answer.whole(made, self._usage())

    async def events(self, watcher: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, ending with [DONE], or with an error and no [DONE]."""
        begun = False
        try:
            async for choice, delta in self._deltas():
                begun = True
                if delta.text or delta.finish or delta.logprobs or not choice.begun:
                    yield _event(self._chunk(choice, delta))
            if self.answer.include_usage:
                yield _event(self.answer.last_chunk(self._usage()))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            if not begun:
                raise
            yield _event(error.body())
        finally:
            watcher.cancel()
            self.cancel()

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What arrives, choice by choice, until all have finished. Raises ApiError for an end that is no answer."""
        waiting = list(self.choices)
        try:
            while waiting:
                await self.filled.wait()
                self.filled.clear()
                for choice in [c for c in waiting if c.stream.pending]:
                    delta = choice.stream.take()
                    if delta.finish:
                        waiting.remove(choice)
                        if delta.finish.reason == "timeout":
                            raise ApiError(504, "the request took longer than --request-timeout allows")
                        if delta.finish.reason in ("error", "abort"):
                            raise ApiError(503, delta.finish.error or "the request was aborted")
                    yield choice, delta
        finally:
            if self.frontend.tracer:
                self.frontend.tracer.emit("Server", "response", self.choices[0].stream.rid)

    def _chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.logprobs, choice.token_chars)
        reason = delta.finish.reason if delta.finish else None
        chunk = self.answer.chunk(choice.index, delta.text, logprobs, reason, first=not choice.begun)
        choice.begun = True
        choice.token_chars += sum(map(len, logprobs["tokens"])) if logprobs and not self.answer.chat else 0
        return chunk

    def _logprobs(self, entries: list[dict[str, Any]], offset: int) -> Any:
        if not self.logprobs:
            return None
        decode = self.frontend.tokenizer.decode

        def name(token: int) -> str:
            return decode([token], skip_special_tokens=False)

        return chat_logprobs(entries, name) if self.answer.chat else completion_logprobs(entries, name, offset)

    def _usage(self) -> dict[str, Any]:
        streams = [c.stream for c in self.choices]
        prompts = {id(s.prompt_ids): s for s in streams}.values()  # the choices of one prompt count it once
        cached = sum(s.count("cached_tokens") for s in prompts)
        drafts = [sum(s.count(name) for s in streams) for name in ("draft_tokens", "accepted_tokens")]
        return usage(sum(len(s.prompt_ids) for s in prompts), sum(s.output_tokens for s in streams), cached, *drafts)


# ---- plumbing -------------------------------------------------------------------------------------------------------


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def _api_error(request: Request, error: Any) -> Response:
    # json.dumps escapes to ASCII, so that an error may quote whatever was wrong.
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


async def _not_found(request: Request, error: Any) -> Response:
    wrong = "method" if error.status_code == 405 else "path"
    message = f"{request.method} {shown(request.url.path)}: no such {wrong} here"
    return await _api_error(request, ApiError(error.status_code, message, headers=error.headers))


async def _our_fault(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(500, "internal error"))
