"""One step after another: schedule, run, process. Owns everything a step needs: device, weights, cache, sampler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from common import cpu, host
from common.checkpoints import Checkpoint, resolve
from common.trace import Tracer

from . import ops, weights
from .attention import TritonBackend, choose_backend, runs_triton
from .config import EngineConfig
from .core import Batch, Limits, Req, ReqState, SamplingParams, ScheduledReq
from .distributed import ALONE, Group, Place, join
from .draft import DraftProposer, check_draft
from .graph import DecodeGraphs
from .kvcache import KVCache, pages_for, token_bytes
from .message import Abort, Flush, Message, Submit, TokensOut
from .model import Decoder, ModelConfig, attention_window
from .model_runner import ModelRunner
from .sampler import Sampler
from .scheduler import Scheduler
from .speculative import FREE_ROWS, NgramProposer, Proposer, Speculator, agreeing
from .tokenizer import Tokenizer, stop_matcher

DEFAULT_MAX_MODEL_LEN = 2048
MAX_COST = 0.4  # of a draft model's forward, in forwards of the target
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
        self.draft_checkpoint = resolve(config.draft_model) if config.draft_model and not place.rank else None
        if self.draft_checkpoint:
            check_draft(self.draft_checkpoint, self.checkpoint)
        torch.set_num_threads(config.threads or max(1, host.cores() // place.local_size))
        self.group = join(config, place, self.device)
        try:
            model = self._load_model(self.checkpoint, self.model_config, self.group)
            draft = None
            if self.draft_checkpoint and self.group.rank == 0:
                shape = ModelConfig.from_dict(self.draft_checkpoint.config)
                draft = self._load_model(self.draft_checkpoint, shape, ALONE)
            caches = self._build_caches([model, draft] if draft else [model])
            self.kv = caches[0]
            self.runner = self._build_runner(model, self.kv, tracer, self.group)
            guesser = self._build_runner(draft, caches[1], None, ALONE) if draft else None
        except BaseException:
            self.group.close(grace_s=0)
            raise
        self.limits = replace(self.limits, kv_tokens=self.kv.num_pages * self.kv.page_size)
        self.sampler = Sampler(config.seed, model.ops.argmax)
        budget = self._token_budget()
        proposer: Proposer | None = NgramProposer() if config.speculative == "ngram" else None
        if guesser and self.draft_checkpoint:
            proposer = DraftProposer(
                guesser,
                self.sampler,
                max_len=_context(self.draft_checkpoint),
                budget=budget,
                cost=_relative_cost(self.draft_checkpoint, self.checkpoint, self.group.size),
            )
        self.scheduler = Scheduler(
            self.kv,
            self.checkpoint.eos_ids,
            max_running=config.max_running,
            max_batch_tokens=budget,
            static=config.scheduler == "static",
            tracer=tracer,
            speculator=Speculator(proposer, config.num_draft_tokens, FREE_ROWS[self.device.type]) if proposer else None,
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
            if self.scheduler.speculator:
                self.scheduler.speculator.proposer.flush()

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
            "draft_tokens": self.scheduler.draft_tokens,
            "accepted_tokens": self.scheduler.accepted_tokens,
            "allreduce_bytes": self.group.bytes,
        }
        return self.counters | queues | memory | events

    def close(self) -> None:
        """Give up what the engine holds, the other ranks above all; it can take no further step."""
        self.group.close()

    def _load_model(self, checkpoint: Checkpoint, config: ModelConfig, group: Group) -> Decoder:
        chosen = ops.choose(self.device, self.dtype, native=self.config.native == "auto")
        if runs_triton(self.device) and self.config.native == "auto":
            from . import kernels  # here, because it needs Triton

            chosen = ops.Ops(chosen.linear, kernels.add_rms_norm, kernels.rotary, kernels.silu_and_mul)
        model = Decoder(config, self.limits.max_model_len, chosen, self.device, self.dtype, group)
        weights.load(model, checkpoint)
        return model

    def _build_caches(self, models: Sequence[Decoder]) -> list[KVCache]:
        """As many pages as the memory allows, up to what max_running requests of full length could use. ``kv_memory`` is
        that of all ranks together. Every rank has the same pages, of its own heads. Two models divide it so that both
        have the same pages, each of its own size."""
        size = self.config.page_size
        page_bytes = size * sum(
            token_bytes(model.config.layers, model.kv_heads, model.config.head_dim, self.dtype) for model in models
        )
        wanted = self.config.max_running * -(-self.limits.max_model_len // size)
        if self.device.type == "cuda" and not self.config.kv_memory_bytes:
            self.group.smallest(0)  # all have loaded: a rank that is late from here on is lost
            for model in models:
                self._run_widest_step(model)
        named = self.config.kv_memory_bytes
        budget = named // self.group.size if named else _memory_budget(self.device, self.group.local_size)
        pages = self.group.smallest(pages_for(wanted, budget, page_bytes))
        return [self._new_cache(model, pages) for model in models]

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
        guesses = min(self.config.num_draft_tokens, extend - 1) if self.config.speculative != "none" else 0
        known = extend - guesses
        reqs = [Req(i, [0] * known, known, SamplingParams(temperature=1.0, top_p=0.9), 1) for i in range(count)]
        for req in reqs:
            kv.allocate(req, extend)
        backend = choose_backend(kv, native=self.config.native == "auto", wanted=self.config.attention_backend)
        runner = ModelRunner(model, kv, backend, self.device)
        batch = Batch([ScheduledReq(req, extend, [0] * guesses) for req in reqs])
        sampler = Sampler(0, model.ops.argmax)
        sampler.sample(runner.forward(runner.prepare(batch)), sampler.rows(batch, self.limits.vocab_size, self.device))
        self.group.bytes = 0

    def _build_runner(self, model: Decoder, kv: KVCache, tracer: Tracer | None, group: Group) -> ModelRunner:
        config = self.config
        backend = choose_backend(kv, native=config.native == "auto", wanted=config.attention_backend)
        runner = ModelRunner(model, kv, backend, self.device, tracer)
        runner.group = group
        if config.cuda_graph and isinstance(backend, TritonBackend):
            width = -(-self.limits.max_model_len // config.page_size)
            runner.graphs = DecodeGraphs(runner.forward_eager, config.max_running, width, self.device)
        return runner

    def _token_budget(self) -> int:
        """Tokens of one step at most."""
        return self.config.max_batch_tokens or (96 if self.device.type == "cpu" else 2048)

    def _run(self, batch: Batch) -> tuple[list[list[int]], list[list[dict[str, Any]]]]:
        """One forward and its draws: per item of the batch its tokens and, if it wants them, their logprobs.

        Tokens after the first that is not the draft's were drawn for a text that is not to be.
        """
        logits = self.runner.run(batch)
        rows = self.sampler.rows(batch, self.limits.vocab_size, self.device)
        ids, details = self.sampler.sample(logits, rows)
        drawn = iter(zip(ids, details, strict=True))
        tokens: list[list[int]] = []
        logprobs: list[list[dict[str, Any]]] = []
        for item in batch.items:
            own = list(islice(drawn, item.rows))
            own = own[: 1 + agreeing(item.draft, [token for token, _ in own])]
            tokens.append([token for token, _ in own])
            logprobs.append([detail for _, detail in own if detail])
            if self.tracer:
                for token in tokens[-1]:
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


def _context(checkpoint: Checkpoint) -> int:
    """The longest text that a model computes rightly here."""
    return min(checkpoint.max_len, attention_window(checkpoint.config) or checkpoint.max_len)


def _relative_cost(draft: Checkpoint, target: Checkpoint, ranks: int) -> float:
    """Time of a forward of the draft model, which rank 0 has to itself, in forwards of the target: a few rows take as
    long as the weights' bytes. Not taken for more than MAX_COST: who names a large draft model wants it to guess."""
    share = host.weight_bytes(target.config, "bfloat16") / ranks
    return min(MAX_COST, host.weight_bytes(draft.config, "bfloat16") / share)


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
