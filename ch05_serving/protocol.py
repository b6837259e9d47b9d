"""OpenAI's request and response forms: what is accepted, what is refused and how, what an answer looks like."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from common.values import shown

from .core import SamplingParams

# Fields of OpenAI's API without a counterpart here, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": ("none",), "functions": ([],), "logit_bias": ({},),
    "modalities": (["text"], []), "parallel_tool_calls": (True, False), "prediction": (), "reasoning_effort": (),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip
IGNORED = ("user", "metadata", "prompt_cache_key", "safety_identifier")  # labels that ask for nothing
MAX_CHOICES = 128
MAX_STOPS = 64  # every token is searched for each of them
MAX_PROMPTS = 1024
MAX_MESSAGES = 8192
MAX_MEMBERS = 256  # of one JSON object
SAMPLING = tuple(f.name for f in fields(SamplingParams))


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


def bad_value(error: ValueError, field: str) -> ApiError:
    """400 for a refusal that begins with the name of a sampling field, or else is about ``field``."""
    name = str(error).split(" ", 1)[0]
    return ApiError(400, str(error), name if name in SAMPLING else field)


# Lists fail at their first wrong item: a body with a million of them would be a million errors, gigabytes and a minute.
Text = Annotated[str, StringConstraints(strict=True)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True)]


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
    stop: Text | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_PROMPTS)] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def extras(self) -> dict[str, tuple[str, Any]]:
        """SamplingParams fields that this endpoint spells its own way: {field: (its name here, value)}."""
        return {}

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        """SamplingParams of choice 0; ``defaults`` stand where the request is silent. Raises ApiError."""
        values = {n: (n, getattr(self, n)) for n in SAMPLING if n in Call.model_fields} | self.extras()
        try:
            return SamplingParams(**(defaults | {n: value for n, (_, value) in values.items() if value is not None}))
        except ValueError as error:
            field, _, rest = str(error).partition(" ")
            name = values[field][0]
            raise ApiError(400, f"{name} {rest}", name) from None


class CompletionCall(Call):
    """The body of /v1/completions: one prompt or several, each as text or as token ids."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = None

    def extras(self) -> dict[str, tuple[str, Any]]:
        return {"logprobs": ("logprobs", self.logprobs)}

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt. ApiError if there is none."""
        if not self.prompt:
            raise ApiError(400, "prompt is empty: at least one token is needed", "prompt")
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt  # type: ignore[return-value]


Nothing = Annotated[list[Any], Field(max_length=0)]  # clients that send an answer back as history may add such lists


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One message of a conversation, as the model's chat template gets it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    annotations: Nothing = []
    tool_calls: Nothing = []
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """Role and content as chat templates know them."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatCall(Call):
    """The body of /v1/chat/completions: a conversation, and the fields that only chats have."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def extras(self) -> dict[str, tuple[str, Any]]:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        extras = {"logprobs": ("top_logprobs", (self.top_logprobs or 0) if self.logprobs else None)}
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ApiError(400, "max_tokens and max_completion_tokens contradict each other", "max_tokens")
            extras["max_tokens"] = ("max_completion_tokens", self.max_completion_tokens)
        return extras


CallT = TypeVar("CallT", bound=Call)


def parse(kind: type[CallT], body: bytes) -> CallT:
    """A checked request from its JSON; ApiError 400 names the field that is wrong."""
    data = _load(body)
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name in [name for name in data if name not in kind.model_fields]:
        value = data.pop(name)
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise ApiError(400, f"{name} is not supported by this server", name)
        if name not in UNSUPPORTED and name not in IGNORED:
            raise ApiError(400, f"unknown field {shown(name)}", shown(name)[1:-1])
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{path[0]}: unknown field {shown(path[-1])}", path[0]) from None
        where = ".".join(path[:3]) if path[0] == "messages" else path[0]  # messages.1.content
        raise ApiError(400, f"{where}: {first['msg']}", path[0]) from None


def _load(body: bytes) -> Any:
    # NaN, Infinity and endless integers come through as floats: the check of the field they stand in names it.
    try:
        return json.loads(body, parse_int=_integer, object_pairs_hook=_members)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 40 else float(digits)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without its nulls, which ask for nothing wherever they stand."""
    if len(pairs) > MAX_MEMBERS:
        raise ApiError(400, f"the body holds an object with more than {MAX_MEMBERS} members")
    return {name: value for name, value in pairs if value is not None}


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


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int, drafted: int, accepted: int) -> dict[str, Any]:
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": details,
    }


def chat_logprobs(entries: Sequence[dict[str, Any]], name: Any) -> dict[str, Any]:
    """OpenAI's chat form; ``name`` gives the text of a token id."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = name(token)
        whole = "\ufffd" not in text  # a token inside a character has no text of its own, and its bytes are not known
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    content = [
        one(e["token_id"], e["logprob"]) | {"top_logprobs": [one(t, lp) for t, lp in e["top"].items()]} for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[dict[str, Any]], name: Any, offsets: list[int]) -> dict[str, Any]:
    """The completions form; ``offsets``: characters of the choice's text before each of these tokens."""

    def key(token: int) -> str:
        text = name(token)
        return f"token_id:{token}" if "\ufffd" in text else text  # parts of characters would all be called the same

    tops: list[dict[str, float]] = [{} for _ in entries]
    for found, entry in zip(tops, entries, strict=True):
        for token, logprob in entry["top"].items():
            found.setdefault(key(token), logprob)  # of two with one text the likelier
    return {
        "tokens": [key(e["token_id"]) for e in entries],
        "token_logprobs": [e["logprob"] for e in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
