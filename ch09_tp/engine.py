"""One step after another: schedule, run, process. Owns everything a step needs: device, weights, cache, sampler."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from common import cpu, host
from common.checkpoints import resolve
from common.trace import Tracer

from . import ops, weights
from .attention import TritonBackend, choose_backend, runs_triton
from .config import EngineConfig
from .core import Batch, Limits, Req, ReqState, SamplingParams, ScheduledReq
from .distributed import Place, join
from .graph import DecodeGraphs
from .kvcache import KVCache, pages_for, token_bytes
from .message import Abort, Flush, Message, Submit, TokensOut
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
        place = config.place or Place.of(config)
        self.model_config.check_ranks(place.size)
        torch.set_num_threads(config.threads or max(1, host.cores() // place.local_size))
        self.group = join(config, place, self.device)
        try:
            model = self._load_model()
            self.kv = self._build_cache(model)
            self.runner = self._build_runner(model, self.kv, tracer)
        except BaseException:
            self.group.close(grace_s=0)
            raise
        self.limits = replace(self.limits, kv_tokens=self.kv.num_pages * self.kv.page_size)
        self.sampler = Sampler(config.seed, model.ops.argmax)
        self.scheduler = Scheduler(
            self.kv,
            self.checkpoint.eos_ids,
            max_running=config.max_running,
            max_batch_tokens=self._token_budget(),
            static=config.scheduler == "static",
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
        elif isinstance(message, Flush):
            self.kv.flush()

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
        else:
            self.group.send()  # an idle engine finds out too that it has lost a rank
        if self.config.debug_invariants:
            self.scheduler.check()
        outs, self._aborted = self._aborted + outs, []  # taken last: a step that is interrupted loses no abort
        return outs

    def stats(self) -> dict[str, int]:
        queues = {"running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting)}
        pages, size = self.kv.ledger(), self.kv.page_size
        used = self.kv.used(self.scheduler.running)
        memory = {"kv_total": pages["total"] * size, "kv_used": used, "kv_cached": pages["cached"] * size}
        events = {
            "preemptions": self.scheduler.preemptions,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "allreduce_bytes": self.group.bytes,
        }
        return self.counters | queues | memory | events

    def close(self) -> None:
        """Give up what the engine holds, the other ranks above all; it can take no further step."""
        self.group.close()

    def _load_model(self) -> Decoder:
        chosen = ops.choose(self.device, self.dtype, native=self.config.native == "auto")
        if runs_triton(self.device) and self.config.native == "auto":
            from . import kernels  # here, because it needs Triton

            chosen = ops.Ops(chosen.linear, kernels.add_rms_norm, kernels.rotary, kernels.silu_and_mul)
        model = Decoder(self.model_config, self.limits.max_model_len, chosen, self.device, self.dtype, self.group)
        weights.load(model, self.checkpoint)
        return model

    def _build_cache(self, model: Decoder) -> KVCache:
        """As many pages as the memory allows, up to what max_running requests of full length could use. ``kv_memory`` is
        that of all ranks together. Every rank has the same pages, of its own heads."""
        config, size = model.config, self.config.page_size
        page_bytes = size * token_bytes(config.layers, model.kv_heads, config.head_dim, self.dtype)
        wanted = self.config.max_running * -(-self.limits.max_model_len // size)
        if self.device.type == "cuda" and not self.config.kv_memory_bytes:
            self.group.smallest(0)  # all have loaded: a rank that is late from here on is lost
            self._run_widest_step(model)
        named = self.config.kv_memory_bytes
        budget = named // self.group.size if named else _memory_budget(self.device, self.group.local_size)
        pages = self.group.smallest(pages_for(wanted, budget, page_bytes))
        return self._new_cache(model, pages)

    def _new_cache(self, model: Decoder, pages: int) -> KVCache:
        config, like = model.config, torch.empty(0, device=self.device, dtype=self.dtype)
        size = self.config.page_size
        return KVCache(config.layers, pages, size, model.kv_heads, config.head_dim, like, self.config.prefix_cache)

    def _run_widest_step(self, model: Decoder) -> None:
        """Profile: run the largest step that there can be, over a cache of its own, and draw from all its logits.

        torch keeps the memory that it took, so that what the device calls free afterwards is free beside such a step. (Its
        contexts are short: attention in plain torch takes more for long ones, the kernels do not.)
        """
        budget, size = self._token_budget(), self.config.page_size
        count = min(self.config.max_running, budget)
        extend = min(budget // count, self.limits.max_model_len)
        kv = self._new_cache(model, count * -(-extend // size))
        reqs = [Req(i, [0] * extend, extend, SamplingParams(temperature=1.0, top_p=0.9), 1) for i in range(count)]
        for req in reqs:
            kv.allocate(req, extend)
        backend = choose_backend(kv, native=self.config.native == "auto", wanted=self.config.attention_backend)
        runner = ModelRunner(model, kv, backend, self.device)
        batch = Batch([ScheduledReq(req, extend) for req in reqs])
        sampler = Sampler(0, model.ops.argmax)
        sampler.sample(runner.forward(runner.prepare(batch)), sampler.rows(batch, self.limits.vocab_size, self.device))
        self.group.bytes = 0

    def _build_runner(self, model: Decoder, kv: KVCache, tracer: Tracer | None) -> ModelRunner:
        config = self.config
        backend = choose_backend(kv, native=config.native == "auto", wanted=config.attention_backend)
        runner = ModelRunner(model, kv, backend, self.device, tracer)
        runner.group = self.group
        if config.cuda_graph and isinstance(backend, TritonBackend):
            width = -(-self.limits.max_model_len // config.page_size)
            runner.graphs = DecodeGraphs(runner.forward_eager, config.max_running, width, self.device)
        return runner

    def _token_budget(self) -> int:
        """Tokens of one step at most."""
        return self.config.max_batch_tokens or (96 if self.device.type == "cpu" else 2048)

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


def _memory_budget(device: torch.device, ranks: int) -> int:
    """Bytes that the keys and values of one rank may take where the user names no number: a part of what its GPU has
    left, or of what the machine has for its ranks."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    return int(host.memory_bytes() * 0.4 / ranks)


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
