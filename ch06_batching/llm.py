"""The offline interface: prompts in, RequestOutput out, everything in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from common.cli import interrupts_wait
from common.trace import Tracer

from .config import EngineConfig
from .core import RequestOutput, SamplingParams
from .engine import Engine
from .message import Abort, Submit, TokensOut
from .tokenizer import Detokenizer

DEFAULT_MAX_TOKENS = 128


@dataclass(slots=True)
class _Open:
    """A request whose answer is being put together; dropped when it finishes."""

    output: RequestOutput
    detokenizer: Detokenizer
    arrival: float  # perf_counter seconds


class LLM:
    """``with LLM(model, **options) as llm: llm.generate(...)``; options are the fields of EngineConfig.

    add/step/abort give the same engine step by step. A prompt that cannot be served does not raise: its output has
    finish_reason "error" and the reason in ``error``.
    """

    def __init__(self, model: str = "smollm2-135m", tracer: Tracer | None = None, **options: Any) -> None:
        known = EngineConfig.__dataclass_fields__
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; known: {', '.join(known)}")
        self.config = EngineConfig(model=model, **options)
        self.tracer = tracer
        self.engine = Engine(self.config, tracer)
        self.tokenizer = self.engine.tokenizer
        self._open: dict[int, _Open] = {}
        self._ready: list[tuple[int, RequestOutput]] = []  # complete, for the next step() to return
        self._next_id = 0
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent; add, step and generate raise RuntimeError from then on."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order. params: one for all (default: greedy), or one per prompt."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or (prompts and isinstance(prompts[0], int)):
            raise ValueError("prompts must be a list of prompts; put a single prompt into a list")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} SamplingParams")
        first = self._next_id
        done: dict[int, RequestOutput] = {}
        try:
            mine = [self.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
            with tqdm(total=len(mine), disable=not progress, desc="requests", unit="req") as bar:
                while len(done) < len(mine):
                    self._advance()
                    done.update((rid, output) for rid, output in self._ready if rid >= first)
                    self._ready = [(rid, output) for rid, output in self._ready if rid < first]  # of add(): for step()
                    bar.update(len(done) - bar.n)
        except BaseException:  # Ctrl-C above all: nothing of an unfinished call stays in the engine
            for rid in range(first, self._next_id):
                self.abort(rid)
                self._open.pop(rid, None)
            self._ready = [(rid, output) for rid, output in self._ready if rid < first]
            raise
        return [done[rid] for rid in mine]

    def add(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue one request and return its id."""
        self._check_open()
        rid, self._next_id = self._next_id, self._next_id + 1
        arrival = time.perf_counter()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        ids: list[int] = []
        try:
            ids = self._encode(rid, prompt)
            max_tokens = self.engine.limits.check(ids, params, DEFAULT_MAX_TOKENS)
        except ValueError as error:
            self._ready.append((rid, RequestOutput(ids, finish_reason="error", error=str(error))))
            return rid
        detokenizer = Detokenizer(self.tokenizer, ids, params.stop)
        self._open[rid] = _Open(RequestOutput(ids), detokenizer, arrival)
        self.engine.handle(Submit(rid, ids, params, max_tokens))
        return rid

    def step(self) -> list[RequestOutput]:
        """Advance the engine by one step; returns the requests that finished in it."""
        self._advance()
        finished, self._ready = self._ready, []
        return [output for _, output in finished]

    def abort(self, rid: int) -> None:
        """Stop a request at the next step boundary: that step returns it with finish_reason "abort". Idempotent."""
        self.engine.handle(Abort(rid))

    def has_work(self) -> bool:
        return bool(self._open or self._ready)

    def stats(self) -> dict[str, int]:
        return self.engine.stats()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def _encode(self, rid: int, prompt: str | Sequence[int]) -> list[int]:
        if self.tracer:
            self.tracer.emit("LLM", "submit", rid)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise ValueError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if self.tracer:
            self.tracer.emit("Tokenizer", "encode", rid, length=len(ids))
        return ids

    def _advance(self) -> None:
        """One step of the engine; who finished in it is in _ready."""
        self._check_open()
        with interrupts_wait():  # else Ctrl-C could lose what a step has produced
            for out in self.engine.step():
                request = self._open.get(out.rid)
                if request is None:  # of a generate() that was interrupted
                    continue
                self._take(request, out)
                if out.finish:
                    del self._open[out.rid]
                    self._ready.append((out.rid, request.output))

    def _take(self, request: _Open, out: TokensOut) -> None:
        output, elapsed = request.output, time.perf_counter() - request.arrival
        output.token_ids += out.ids
        output.token_times += [elapsed] * len(out.ids)
        text = request.detokenizer.push(out.text_ids)
        if out.logprobs is not None:
            output.logprobs = (output.logprobs or []) + out.logprobs
        if out.finish:
            text += request.detokenizer.flush(out.finish.cut)
            output.finish_reason, output.error = out.finish.reason, out.finish.error
            output.cached_tokens = int(out.counters["cached_tokens"])
            output.draft_tokens = int(out.counters.get("draft_tokens", 0))
            output.accepted_tokens = int(out.counters.get("accepted_tokens", 0))
            scheduled_at = out.counters["scheduled_at"]  # 0: it never ran
            queue_s = scheduled_at - request.arrival if scheduled_at else elapsed
            output.timings = _timings(output.token_times, elapsed, queue_s)
        output.text += text
        if self.tracer:
            last = output.token_ids[-1] if out.ids else None
            self.tracer.emit("Detokenizer", "push", out.rid, token=last, text=text)
            if out.finish:
                self.tracer.emit("LLM", "output", out.rid, text=output.text, note=out.finish.reason)


def _timings(token_times: list[float], elapsed: float, queue_s: float) -> dict[str, float]:
    """queue_s, ttft_s, tpot_s, e2e_s in seconds; tpot_s is the mean time per token after the first."""
    ttft = token_times[0] if token_times else elapsed
    tpot = (token_times[-1] - ttft) / (len(token_times) - 1) if len(token_times) > 1 else 0.0
    return {"queue_s": queue_s, "ttft_s": ttft, "tpot_s": tpot, "e2e_s": elapsed}
