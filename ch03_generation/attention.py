"""Attention over a ragged batch: requests of different lengths one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from .core import ForwardInput


class Backend(Protocol):
    """How attention is computed; every backend gives what TorchBackend gives."""

    def plan(self, inp: ForwardInput) -> Any:
        """What all layers of one step share; comes back as the last argument of attend()."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: Any) -> torch.Tensor: ...


@dataclass(slots=True)
class Plan:
    """What all layers of one step share, computed once on the host."""

    spans: list[tuple[int, int]]  # token rows of each request


class TorchBackend:
    """The definition, in plain torch: causal attention inside each request's own tokens."""

    def plan(self, inp: ForwardInput) -> Plan:
        bounds = inp.cu_extend.tolist()
        return Plan(list(zip(bounds[:-1], bounds[1:], strict=True)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
        """q[T, H, D], k[T, KV, D], v[T, KV, D] -> [T, H, D]; query head h reads KV head h // (H / KV)."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for start, end in plan.spans:
            out[start:end] = causal(q[start:end], k[start:end], v[start:end])
        return out


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one request: q[E, H, D], k and v[E, KV, D] -> [E, H, D]; token i sees tokens 0..i."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
