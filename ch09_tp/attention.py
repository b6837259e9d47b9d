"""Attention over a ragged batch: requests of different lengths one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from common.cpu import CpuOps, fits_native_attention, native_ops

from .core import ForwardInput
from .kvcache import KVCache


class Backend(Protocol):
    """How attention is computed; every backend gives what TorchBackend gives."""

    def plan(self, inp: ForwardInput) -> Any:
        """What all layers of one step share; comes back as the last argument of attend()."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: Any) -> torch.Tensor: ...


@dataclass(slots=True)
class Plan:
    """What all layers of one step share, computed once on the host."""

    slots: torch.Tensor  # int64[T], where this step's keys and values go
    spans: list[tuple[int, int, int, list[int]]]  # per request: first row, row after the last, tokens it has, pages
    # Requests with one row are not in spans: they are computed together.
    decode_rows: torch.Tensor  # int64[D]
    decode_table: torch.Tensor  # int64[D, W], their pages
    decode_mask: torch.Tensor  # bool[D, 1, 1, S], true where position s exists; S is the longest of them


class TorchBackend:
    """The definition, in plain torch: each token of the step attends to all tokens of its request up to itself."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def plan(self, inp: ForwardInput) -> Plan:
        bounds, lengths, pages = inp.cu_extend.tolist(), inp.seq_lens.tolist(), inp.table.tolist()
        spans = list(zip(bounds[:-1], bounds[1:], lengths, pages, strict=True))
        decode = [i for i, (start, end, _, _) in enumerate(spans) if end == start + 1]
        longest = max((lengths[i] for i in decode), default=0)
        mask = torch.arange(longest, device=inp.ids.device) < inp.seq_lens[decode, None]
        rows = torch.tensor([bounds[i] for i in decode], dtype=torch.int64, device=inp.ids.device)
        several = [span for span in spans if span[1] > span[0] + 1]
        return Plan(inp.slots, several, rows, inp.table[decode].long(), mask[:, None, None])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
        """q[T, H, D], k[T, KV, D], v[T, KV, D] -> [T, H, D]; query head h reads KV head h // (H / KV).

        Stores k and v first, then reads everything from the cache.
        """
        self.kv.store(layer, k, v, plan.slots)
        keys, values = self.kv.k[layer], self.kv.v[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(plan.decode_rows):
            longest = plan.decode_mask.shape[-1]
            k_all, v_all = (gather_all(cache, plan.decode_table, longest) for cache in (keys, values))
            out[plan.decode_rows] = decode_attention(q[plan.decode_rows], k_all, v_all, plan.decode_mask)
        for start, end, length, pages in plan.spans:
            out[start:end] = causal(q[start:end], gather(keys, pages, length), gather(values, pages, length))
        return out


class NativeBackend:
    """The same by one compiled operator, which reads the pages where they lie."""

    def __init__(self, kv: KVCache, ops: CpuOps) -> None:
        self.kv, self.ops = kv, ops

    def plan(self, inp: ForwardInput) -> ForwardInput:
        return inp

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: ForwardInput) -> torch.Tensor:
        keys, values = self.kv.k[layer], self.kv.v[layer]
        self.ops.store_kv(k, v, keys, values, plan.slots)
        scale = q.shape[-1] ** -0.5
        return self.ops.paged_attention(q, keys, values, plan.table, plan.cu_extend, plan.seq_lens, scale)


@dataclass(slots=True)
class TritonPlan:
    """What all layers of one step share: the first ``decodes`` requests have one row each, the others several."""

    inp: ForwardInput
    decodes: int
    bounds: torch.Tensor | None = None  # int32[B - decodes + 1], rows of the others, from 0; None if there are none
    max_extend: int = 0  # rows of the longest of them


class TritonBackend:
    """The same by GPU kernels: decode rows and the ragged rest each take one launch per layer.

    A slot below 0 is not written, and a request of length 0 gets zeros.
    """

    def __init__(self, kv: KVCache) -> None:
        from . import kernels  # here, because it needs Triton

        self.kv, self.kernels = kv, kernels

    def plan(self, inp: ForwardInput) -> TritonPlan:
        """A decode step is known by its shapes and reads nothing on the host, so that a CUDA graph can capture it."""
        count = len(inp.seq_lens)
        if len(inp.ids) == count:
            return TritonPlan(inp, count)
        bounds = inp.cu_extend.tolist()
        extends = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        decodes = next(i for i, extend in enumerate(extends) if extend > 1)
        return TritonPlan(inp, decodes, inp.cu_extend[decodes:] - bounds[decodes], max(extends[decodes:]))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: TritonPlan) -> torch.Tensor:
        inp, n, caches = plan.inp, plan.decodes, (self.kv.k[layer], self.kv.v[layer])
        self.kernels.store_kv(k, v, *caches, inp.slots)
        out, scale = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.shape[2] ** -0.5
        if n:
            self.kernels.paged_decode(q[:n], *caches, inp.table[:n], inp.seq_lens[:n], scale, out=out[:n])
        if plan.bounds is not None:
            table, lengths, longest = inp.table[n:], inp.seq_lens[n:], plan.max_extend
            self.kernels.paged_prefill(q[n:], *caches, table, plan.bounds, lengths, scale, longest, out=out[n:])
        return out


def runs_triton(device: torch.device) -> bool:
    """Whether the kernels are made for this device: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def choose_backend(kv: KVCache, native: bool, wanted: str = "auto") -> Backend:
    """The fastest backend that is right on this machine; ``native`` False keeps a CPU to plain torch.

    wanted: "auto", or the one to take; ValueError where this machine does not have it.
    """
    if wanted == "triton" or (wanted == "auto" and runs_triton(kv.k.device)):
        if not runs_triton(kv.k.device):
            raise ValueError(
                "attention_backend triton needs a CUDA device of compute capability 8.0 or more; use torch"
            )
        return TritonBackend(kv)
    fits = wanted == "native" or (native and wanted == "auto")
    fits = fits and kv.k.device.type == "cpu" and fits_native_attention(kv.k.shape[-1])
    ops = native_ops() if fits else None
    if wanted == "native" and ops is None:
        raise ValueError(
            "attention_backend native is not to be had here: no compiler, a GPU, or a head size it is not made for"
        )
    return TorchBackend(kv) if ops is None else NativeBackend(kv, ops)


def gather(cache: torch.Tensor, pages: list[int], length: int) -> torch.Tensor:
    """The first ``length`` positions of one request, in order: cache[P, page_size, KV, D] -> [length, KV, D]."""
    count = -(-length // cache.shape[1])
    return cache[pages[:count]].flatten(0, 1)[:length]


def gather_all(cache: torch.Tensor, table: torch.Tensor, longest: int) -> torch.Tensor:
    """The first ``longest`` positions of several requests: table int64[D, W] -> [D, longest, KV, D]; what lies beyond a
    request's own length is whatever its page holds."""
    count = -(-longest // cache.shape[1])
    return cache[table[:, :count]].flatten(1, 2)[:, :longest]


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One query per request: q[D, H, dim], k and v[D, S, KV, dim], mask bool[D, 1, 1, S] -> [D, H, dim].

    The heads of a group become rows, so that they share one read of their KV head.
    """
    count, heads, dim = q.shape
    rows = q.view(count, k.shape[2], -1, dim)
    return scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask).view(
        count, heads, dim
    )


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one request: q[E, H, D], k and v[S, KV, D] -> [E, H, D]; the last query sees all S tokens."""
    extend, seq, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = None
    if extend < seq:
        mask = torch.ones(extend, seq, dtype=torch.bool, device=q.device).tril(seq - extend)
    out = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None)
    return out[0].transpose(0, 1)
