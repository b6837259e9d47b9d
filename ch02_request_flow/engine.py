"""One step after another: schedule, run, process. Owns everything a step needs."""

from __future__ import annotations

import torch

from common.checkpoints import resolve
from common.trace import Tracer

from .config import EngineConfig
from .core import Batch, Req, ReqState
from .message import Abort, Message, Submit, TokensOut
from .model_runner import ModelRunner
from .scheduler import Scheduler
from .scripted import ANSWER, ScriptedLimits, ScriptedModel
from .tokenizer import Tokenizer, stop_matcher

DEFAULT_MAX_MODEL_LEN = 2048
STATS = (
    "forwarded_tokens", "prefill_tokens", "decode_tokens", "steps", "kv_total", "kv_used", "kv_cached",
    "prefix_hit_tokens", "preemptions", "draft_tokens", "accepted_tokens", "allreduce_bytes", "running", "waiting",
)  # fmt: skip


class Engine:
    """Takes messages, gives TokensOut. Nothing that a checked request contains makes step() raise."""

    def __init__(self, config: EngineConfig, tracer: Tracer | None = None) -> None:
        self.config = config
        self.tracer = tracer
        self.checkpoint = resolve(config.model)
        self.tokenizer = Tokenizer(self.checkpoint.folder)
        self.limits = ScriptedLimits(
            max_model_len=_max_model_len(config.max_model_len, self.checkpoint.max_len),
            vocab_size=self.checkpoint.vocab_size,
        )
        answer_ids = self.tokenizer.encode(ANSWER, special_tokens=False)
        model = ScriptedModel(answer_ids, (*self.checkpoint.eos_ids, 0)[0], self.checkpoint.vocab_size)
        self.runner = ModelRunner(model, tracer)
        self.scheduler = Scheduler(
            self.checkpoint.eos_ids,
            tracer=tracer,
        )
        self.counters = dict.fromkeys(STATS, 0)
        self._aborted: list[TokensOut] = []

    def handle(self, message: Message) -> None:
        """Take one message; it shows effect from the next step on."""
        if isinstance(message, Submit):
            req = Req(message.rid, list(message.token_ids), len(message.token_ids), message.params, message.max_tokens)
            req.stop = stop_matcher(self.tokenizer, req)
            self.scheduler.add(req)
        elif isinstance(message, Abort):
            out = self.scheduler.abort(message.rid)
            if out:
                self._aborted.append(out)

    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._aborted)

    def step(self) -> list[TokensOut]:
        """One forward over the scheduled requests. Returns what it produced, aborts since the last step first."""
        outs: list[TokensOut] = []
        if self.tracer:
            self.tracer.step += 1
        batch = self.scheduler.schedule()
        if batch:
            self._count(batch)
            outs = self.scheduler.process(batch, self._run(batch))
        if self.config.debug_invariants:
            self.scheduler.check()
        outs, self._aborted = self._aborted + outs, []  # taken last: a step that is interrupted loses no abort
        return outs

    def stats(self) -> dict[str, int]:
        queues = {"running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting)}
        return self.counters | queues

    def close(self) -> None:
        """Give up what the engine holds; it can take no further step."""

    def _run(self, batch: Batch) -> list[list[int]]:
        logits = self.runner.run(batch)
        picked = iter(torch.argmax(logits, dim=-1).tolist())
        return [[next(picked)] if item.samples else [] for item in batch.items]

    def _count(self, batch: Batch) -> None:
        self.counters["steps"] += 1
        self.counters["forwarded_tokens"] += batch.tokens
        for item in batch.items:
            kind = "prefill_tokens" if item.req.state is ReqState.PREFILL else "decode_tokens"
            self.counters[kind] += item.extend_len


def _max_model_len(wanted: int, model_max: int) -> int:
    if wanted > model_max:
        raise ValueError(f"max_model_len {wanted} exceeds what the model was made for: {model_max}")
    return wanted or min(model_max, DEFAULT_MAX_MODEL_LEN)
