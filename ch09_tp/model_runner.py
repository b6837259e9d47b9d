"""Turns a batch of requests into plain tensors, runs the model on them and returns logits."""

from __future__ import annotations

import time

import torch

from common.trace import Tracer

from .attention import Backend
from .core import Batch, Context, ForwardInput
from .distributed import ALONE, Group
from .graph import DecodeGraphs
from .kvcache import KVCache
from .model import Decoder


class ModelRunner:
    """The only place that knows both requests and tensors: what follows prepare() sees no Req."""

    def __init__(
        self, model: Decoder, kv: KVCache, backend: Backend, device: torch.device, tracer: Tracer | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.backend = backend
        self.device = device
        self.tracer = tracer
        self.graphs: DecodeGraphs | None = None
        self.group: Group = ALONE

    def prepare(self, batch: Batch) -> ForwardInput:
        """Flatten the batch: the tokens of all requests one after another, without padding."""
        ids: list[int] = []
        positions: list[int] = []
        bounds, seq_lens, logit_rows = [0], [], []
        for item in batch.items:
            start, end = item.req.cached_len, item.req.cached_len + item.extend_len
            ids += item.req.token_ids[start:end]
            positions += range(start, end)
            bounds.append(len(ids))
            seq_lens.append(end)
            if item.samples:
                logit_rows.append(len(ids) - 1)
        return ForwardInput(
            ids=torch.tensor(ids, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            cu_extend=torch.tensor(bounds, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
            table=torch.tensor(self.kv.table([i.req for i in batch.items]), dtype=torch.int32, device=self.device),
            slots=torch.tensor(self.kv.slots(batch), device=self.device),
        )

    def forward(self, inp: ForwardInput) -> torch.Tensor:
        """Logits[R, vocab_size], one row per entry of inp.logit_rows; from a graph, valid until the next call.

        All ranks call it with the same input, and so run the same graphs.
        """
        counted = self.group.bytes
        logits = self.graphs.run(inp) if self.graphs else None
        if logits is None:
            return self.forward_eager(inp)
        self.group.bytes = counted + self.model.allreduce_bytes(len(inp.ids))  # a replay runs no code that counts
        return logits

    @torch.inference_mode()
    def forward_eager(self, inp: ForwardInput) -> torch.Tensor:
        return self.model.forward(Context(inp, self.backend, self.backend.plan(inp)))

    def follow(self) -> None:
        """On ranks other than 0: run what rank 0 sends until it stops."""
        while (inp := self.group.receive()) is not None:
            self.forward(inp)

    def run(self, batch: Batch) -> torch.Tensor:
        """prepare and forward, on all ranks, traced."""
        started = time.perf_counter()
        inp = self.prepare(batch)
        self.group.send(inp)
        logits = self.forward(inp)
        if self.tracer:
            for item in batch.items:
                self.tracer.emit(
                    "ModelRunner",
                    "forward",
                    item.req.rid,
                    state=item.req.state.name,
                    length=item.req.length,
                    cached_len=item.req.cached_len,
                    extend_len=item.extend_len,
                    dur=time.perf_counter() - started,
                )
        return logits
