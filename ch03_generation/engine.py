"""One step after another: schedule, run, process. Owns everything a step needs: device, weights, sampler."""

from __future__ import annotations

import sys
from typing import Any

import torch

from common import cpu, host
from common.checkpoints import resolve
from common.trace import Tracer

from . import ops, weights
from .attention import TorchBackend
from .config import EngineConfig
from .core import Batch, Limits, Req, ReqState
from .message import Abort, Message, Submit, TokensOut
from .model import Decoder, ModelConfig, attention_window
from .model_runner import ModelRunner
from .sampler import Sampler
from .scheduler import Scheduler
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
        self.model_config = ModelConfig.from_dict(self.checkpoint.config)  # transformers would refuse less clearly
        self.tokenizer = Tokenizer(self.checkpoint.folder)
        self.limits = Limits(
            max_model_len=_max_model_len(
                config.max_model_len, self.checkpoint.max_len, attention_window(self.checkpoint.config)
            ),
            vocab_size=self.checkpoint.vocab_size,
        )
        self.device = _device(config.device)
        self.dtype = _dtype(config.dtype, self.device)
        torch.set_num_threads(config.threads or host.cores())
        model = self._load_model()
        self.runner = ModelRunner(model, TorchBackend(), self.device, tracer)
        self.sampler = Sampler(config.seed, model.ops.argmax)
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
            outs = self.scheduler.process(batch, *self._run(batch))
        if self.config.debug_invariants:
            self.scheduler.check()
        outs, self._aborted = self._aborted + outs, []  # taken last: a step that is interrupted loses no abort
        return outs

    def stats(self) -> dict[str, int]:
        queues = {"running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting)}
        return self.counters | queues

    def close(self) -> None:
        """Give up what the engine holds; it can take no further step."""

    def _load_model(self) -> Decoder:
        chosen = ops.choose(self.device, self.dtype, native=self.config.native == "auto")
        model = Decoder(self.model_config, self.limits.max_model_len, chosen, self.device, self.dtype)
        weights.load(model, self.checkpoint)
        return model

    def _run(self, batch: Batch) -> tuple[list[list[int]], list[list[dict[str, Any]]]]:
        """One forward and its draws: per item of the batch its tokens and, if it wants them, their logprobs."""
        logits = self.runner.run(batch)
        rows = self.sampler.rows(batch, self.limits.vocab_size, self.device)
        ids, details = self.sampler.sample(logits, rows)
        drawn = iter(zip(ids, details, strict=True))
        tokens: list[list[int]] = []
        logprobs: list[list[dict[str, Any]]] = []
        for item in batch.items:
            token, detail = next(drawn) if item.samples else (None, None)
            tokens.append([] if token is None else [token])
            logprobs.append([detail] if detail else [])
            if self.tracer and token is not None:
                self.tracer.emit("Sampler", "sample", item.req.rid, token=token)
        return tokens, logprobs

    def _count(self, batch: Batch) -> None:
        self.counters["steps"] += 1
        self.counters["forwarded_tokens"] += batch.tokens
        for item in batch.items:
            kind = "prefill_tokens" if item.req.state is ReqState.PREFILL else "decode_tokens"
            self.counters[kind] += item.extend_len


def _max_model_len(wanted: int, model_max: int, window: int | None) -> int:
    """Beyond the window of a sliding-window model full attention, which is all there is here, would be wrong."""
    if wanted > model_max:
        raise ValueError(f"max_model_len {wanted} exceeds what the model was made for: {model_max}")
    length = wanted or min(model_max, DEFAULT_MAX_MODEL_LEN)
    if window is None or length <= window:
        return length
    if wanted:
        raise ValueError(f"max_model_len {wanted} exceeds the model's sliding window of {window} tokens: use {window}")
    print(f"max_model_len is {window}: beyond its sliding window this model is not supported", file=sys.stderr)
    return window


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        if device.type == "cuda":
            wanted = "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
        else:
            wanted = "bfloat16" if cpu.has_native_bf16() else "float32"
    return getattr(torch, wanted)
