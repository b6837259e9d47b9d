"""The vocabulary of the engine: what a request is, which states it passes through, what one step works on."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from common.values import check_bool, check_integer, check_number, integers, shown, strings

if TYPE_CHECKING:
    import torch

    from .attention import Backend
    from .tokenizer import StopMatcher

MAX_LOGPROBS = 20  # as in OpenAI's API
TIMINGS = ("queue_s", "ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens and when it ends; immutable, so one object may serve many requests.

    temperature 0 is exact argmax. top_k 0 or -1, top_p 1, min_p 0 and penalties 1/0/0 are off. The order is that
    of transformers: penalties, temperature, top_k, top_p, min_p. presence and frequency count the output only,
    repetition the prompt too. ``logprobs`` N returns each token's log-probability and the N best alternatives.
    Raises ValueError on construction, naming the field.
    """

    max_tokens: int | None = None  # None: the caller's default
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        object.__setattr__(self, "stop", strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", integers("stop_token_ids", self.stop_token_ids, 0, 2**31 - 1))
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        check_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)


class ReqState(enum.Enum):
    """Where a request is in its life; TRANSITIONS says where it may go from there."""

    WAITING = "WAITING"  # in the waiting queue; owns no execution resources
    PREFILL = "PREFILL"  # running; its token_ids are not all computed
    DECODE = "DECODE"  # running; all of its token_ids but the last are computed
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"


# PREFILL/DECODE -> WAITING is preemption: execution state is given up, its tokens are kept.
TRANSITIONS: dict[ReqState, frozenset[ReqState]] = {
    ReqState.WAITING: frozenset({ReqState.PREFILL, ReqState.ABORTED}),
    ReqState.PREFILL: frozenset({ReqState.DECODE, ReqState.FINISHED, ReqState.ABORTED, ReqState.WAITING}),
    ReqState.DECODE: frozenset({ReqState.FINISHED, ReqState.ABORTED, ReqState.WAITING}),
    ReqState.FINISHED: frozenset(),
    ReqState.ABORTED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Req:
    """One request inside the engine. Only the scheduler changes it.

    Stored lengths are few and ordered: 0 <= cached_len < length <= max_model_len, prompt_len <= sent_len <= length.
    """

    rid: int
    token_ids: list[int]  # prompt + output in one list
    prompt_len: int
    params: SamplingParams
    max_tokens: int  # resolved: params.max_tokens or the caller's default
    stop: StopMatcher | None = None
    state: ReqState = ReqState.WAITING
    cached_len: int = 0  # tokens whose keys and values are kept; the next forward starts here
    sent_len: int = 0  # token_ids[:sent_len] have left in a TokensOut (the prompt counts as sent)
    cached_tokens: int = 0  # prompt tokens that never had to be computed, for the usage report
    scheduled_at: float = 0.0  # perf_counter seconds of the first step that ran it
    pages: list[int] = field(default_factory=list)  # of the KV cache, in the order of its tokens
    shared: int = 0  # its first ``shared`` pages are the prefix cache's, the others its own
    prefix: Any = None  # the node of the prefix cache that protects them
    sampler_state: Any = None  # owned by the sampler: what penalties need to know about earlier tokens
    speculation: Any = None  # owned by the speculator: what its guesses are made and limited by
    draft_tokens: int = 0  # guessed for this request and verified
    accepted_tokens: int = 0  # of these, part of its output

    def __post_init__(self) -> None:
        self.sent_len = self.sent_len or self.prompt_len

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def to(self, state: ReqState) -> None:
        """Change state; an edge that TRANSITIONS does not hold raises RuntimeError."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.rid}: illegal transition {self.state.name} -> {state.name}")
        if state is ReqState.PREFILL and not self.scheduled_at:
            self.scheduled_at = time.perf_counter()
        self.state = state


@dataclass(slots=True)
class ScheduledReq:
    """One request's part of a step: compute token_ids[cached_len : cached_len + extend_len].

    With a ``draft`` these are the last known token and the guesses after it, which are no part of token_ids.
    """

    req: Req
    extend_len: int
    draft: list[int] = field(default_factory=list)
    draft_probs: list[torch.Tensor] = field(default_factory=list)  # float32[V] each was drawn from; empty: certain

    @property
    def samples(self) -> bool:
        """True if this part reaches the last known token, so that its logits give the token after it."""
        return self.req.cached_len + self.extend_len == self.req.length + len(self.draft)

    @property
    def rows(self) -> int:
        """Logit rows that this part gives: one after the last known token and one after each token of the draft."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class Batch:
    """What one step computes."""

    items: list[ScheduledReq]

    @property
    def phase(self) -> str:
        """ "prefill", "decode" or "mixed", derived from the requests' states."""
        states = {item.req.state for item in self.items}
        return states.pop().name.lower() if len(states) == 1 else "mixed"

    @property
    def tokens(self) -> int:
        return sum(item.extend_len for item in self.items)


@dataclass(slots=True)
class ForwardInput:
    """One step as plain tensors; knows no request. T = tokens computed, B = requests, R = logit rows."""

    ids: torch.Tensor  # int64[T]
    positions: torch.Tensor  # int64[T]
    cu_extend: torch.Tensor  # int32[B + 1], request b owns tokens cu_extend[b] : cu_extend[b + 1]
    seq_lens: torch.Tensor  # int32[B], length of each request including this step's tokens
    logit_rows: torch.Tensor  # int64[R], the tokens whose logits are wanted
    table: torch.Tensor  # int32[B, P], the KV pages of each request, padded with 0
    slots: torch.Tensor  # int64[T], where the keys and values of each token go


@dataclass(slots=True)
class Context:
    """What one forward shares and no request owns; passed to the model explicitly, never a global."""

    inp: ForwardInput
    backend: Backend
    plan: Any  # made by the backend for this input


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take: every request is checked against it at the door, before it enters a queue."""

    max_model_len: int  # tokens of prompt + output
    vocab_size: int
    kv_tokens: int = 2**62  # tokens whose keys and values the whole pool holds

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, default_max_tokens: int | None) -> int:
        """Return the request's max_tokens (default None: the rest of the context) or raise ValueError saying why not."""
        if not prompt_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if any(token >= self.vocab_size for token in params.stop_token_ids):
            raise ValueError(f"stop_token_ids must be below the vocabulary size {self.vocab_size}")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens but max_model_len is {self.max_model_len}: no room for an output token"
            )
        for token in prompt_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {shown(token)} is not an integer from 0 to {self.vocab_size - 1}")
        if params.max_tokens is None:
            room = min(room, self.kv_tokens + 1 - len(prompt_ids))  # the last token is never computed
            if room < 1:
                raise ValueError(f"the prompt has {len(prompt_ids)} tokens but the KV memory holds {self.kv_tokens}")
            return room if default_max_tokens is None else min(room, default_max_tokens)
        if params.max_tokens > room:
            raise ValueError(
                f"prompt ({len(prompt_ids)} tokens) + max_tokens ({params.max_tokens}) = "
                f"{len(prompt_ids) + params.max_tokens} exceeds max_model_len {self.max_model_len}"
            )
        needed = len(prompt_ids) + params.max_tokens - 1  # the last token is never computed
        if needed > self.kv_tokens:
            raise ValueError(
                f"prompt ({len(prompt_ids)} tokens) + max_tokens ({params.max_tokens}) need {needed} tokens of KV memory, "
                f"the whole of it holds {self.kv_tokens}"
            )
        return params.max_tokens


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request. Times are in seconds."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)  # includes the EOS or stop token, nothing after it
    text: str = ""  # excludes stop strings and special tokens
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    cached_tokens: int = 0
    draft_tokens: int = 0  # guessed ahead of the model
    accepted_tokens: int = 0  # of these, part of the output
    logprobs: list[dict[str, Any]] | None = None  # per token {token_id, logprob, top: {id: logprob}}
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMINGS, 0.0))
    error: str | None = None
    token_times: list[float] = field(default_factory=list)  # seconds after arrival, one per output token

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token_times"}
