"""OpenAI's request and response forms: what is accepted, what is refused and how, what an answer looks like."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from .core import SamplingParams

# Fields of OpenAI's API without a counterpart here, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": ("none",), "functions": ([],), "logit_bias": ({},),
    "modalities": (["text"], []), "parallel_tool_calls": (True, False), "prediction": (), "prompt_cache_key": (),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "safety_identifier": (), "service_tier": ("auto", "default"),
    "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip
IGNORED = ("user", "metadata")  # labels: they ask for nothing that could be refused
MAX_CHOICES = 128


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        codes = {401: "invalid_api_key", 404: "model_not_found" if self.param == "model" else None, 429: "queue_full"}
        error = {"message": self.message, "type": kind, "param": self.param, "code": codes.get(self.status)}
        return {"error": error}


Text = Annotated[str, StringConstraints(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Call(BaseModel):
    """The fields that both endpoints share. Ranges are checked by SamplingParams, so that there is one place for them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def sampling(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """SamplingParams of choice 0; ``defaults`` stand where the request is silent. Raises ApiError."""
        names = {f.name for f in fields(SamplingParams)}
        given = {k: v for k, v in self.model_dump().items() if k in names and v is not None and k != "logprobs"}
        try:
            return SamplingParams(**(defaults | given | more))
        except ValueError as error:
            message = str(error)
            raise ApiError(400, message, message.split(" ", 1)[0]) from None


class CompletionCall(Call):
    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        p = self.prompt
        return [p] if isinstance(p, str) or (p and isinstance(p[0], int)) else p  # type: ignore[list-item,return-value]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """Role and content as chat templates know them."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatCall(Call):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


CallT = TypeVar("CallT", bound=Call)


def parse(kind: type[CallT], body: bytes) -> CallT:
    """A checked request from its JSON; ApiError 400 names the field that is wrong."""
    data = _load(body)
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    data = {key: value for key, value in data.items() if value is not None and key not in IGNORED}
    for name in UNSUPPORTED.keys() & data.keys():
        if data[name] not in UNSUPPORTED[name]:
            raise ApiError(400, f"{name} is not supported by this server", name)
        del data[name]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"unknown field {'.'.join(path)!r}", path[-1]) from None
        raise ApiError(400, f"{path[0]}: {first['msg']}", path[0]) from None


def _load(body: bytes) -> Any:
    # NaN, Infinity and endless integers come through as floats: the check of the field they stand in names it.
    try:
        return json.loads(body, parse_int=lambda digits: int(digits) if len(digits) < 40 else float(digits))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class Answer:
    """Builds the responses to one call, whole or in chunks; knows nothing of streams and engines."""

    def __init__(self, model: str, chat: bool, include_usage: bool) -> None:
        self.chat, self.include_usage = chat, include_usage
        self.kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self.head, "object": self.kind, "choices": list(choices), "usage": usage}

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        body: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}

    def chunk(self, index: int, text: str, logprobs: Any, reason: str | None, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        body: dict[str, Any] = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([choice], {"usage": None} if self.include_usage else {})

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([], {"usage": usage})

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        kind = self.kind + ".chunk" if self.chat else self.kind
        return {**self.head, "object": kind, "choices": choices, **more}


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_logprobs(entries: Sequence[dict[str, Any]], name: Any) -> dict[str, Any]:
    """OpenAI's chat form; ``name`` gives the text of a token id."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = name(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        one(e["token_id"], e["logprob"]) | {"top_logprobs": [one(t, lp) for t, lp in e["top"].items()]} for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[dict[str, Any]], name: Any, offset: int) -> dict[str, Any]:
    """The completions form; ``offset`` is the length of the choice's text before these tokens, in characters."""
    tokens = [name(e["token_id"]) for e in entries]
    offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [e["logprob"] for e in entries],
        "top_logprobs": [{name(t): lp for t, lp in e["top"].items()} for e in entries],
        "text_offset": offsets,
    }
