"""Everything that crosses the boundary between the interface and the engine, as plain dataclasses.

Control path: Submit, Abort, Flush go in. Data path: TokensOut comes out. Fatal says that the engine has died.
Each message survives ``from_dict(json.loads(json.dumps(m.to_dict())))`` unchanged, so that any transport will do.
"""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from .core import SamplingParams


class Message:
    """Base of all messages: to_dict and from_dict."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        plain = {name: asdict(value) if is_dataclass(value) else copy(value) for name, value in values.items()}  # type: ignore[arg-type]
        return {"kind": type(self).__name__, **plain}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Message:
        """Inverse of to_dict; an unknown kind raises KeyError."""
        values = dict(data)
        cls = KINDS[values.pop("kind")]
        if isinstance(values.get("params"), dict):
            values["params"] = SamplingParams(**values["params"])
        if isinstance(values.get("finish"), dict):
            values["finish"] = Finish(**values["finish"])
        if values.get("logprobs"):  # JSON has no integer keys
            values["logprobs"] = [d | {"top": {int(i): p for i, p in d["top"].items()}} for d in values["logprobs"]]
        return cls(**values)


@dataclass(slots=True)
class Submit(Message):
    """One checked request: ids in range, lengths that fit, max_tokens resolved."""

    rid: int
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int


@dataclass(slots=True)
class Abort(Message):
    """Stop a request at the next step boundary; idempotent, unknown ids are ignored."""

    rid: int


@dataclass(slots=True)
class Flush(Message):
    """Drop everything the engine caches and no live request uses."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended. ``cut`` is the length of its text in characters where a stop string ended it."""

    reason: str  # "stop" | "length" | "abort" | "error"
    cut: int | None = None
    error: str | None = None


@dataclass(slots=True)
class TokensOut(Message):
    """The tokens one step gave one request; ``finish`` is set on its last message and never again."""

    rid: int
    ids: list[int]
    finish: Finish | None = None
    logprobs: list[dict[str, Any]] | None = None
    counters: dict[str, float] = field(default_factory=dict)  # with finish: what the request counted, as cached_tokens

    @property
    def text_ids(self) -> list[int]:
        """The ids that become text: without the EOS or stop token that ended the request."""
        ended_by_token = self.finish and self.finish.reason == "stop" and self.finish.cut is None
        return self.ids[:-1] if ended_by_token else self.ids


@dataclass(slots=True)
class Fatal(Message):
    """The engine cannot go on; every open request fails with this error."""

    error: str


KINDS: dict[str, type] = {cls.__name__: cls for cls in (Submit, Abort, Flush, TokensOut, Fatal)}
