"""What the CPU operators compute, in plain torch: the fallback where no compiler exists, and the oracle of their tests.

Signatures are those of the operators. Where torch rounds between operations, in bfloat16 and float16, so do they.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention, silu


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    cu_extend: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a ragged batch over paged keys and values.

    q[T, H, D]; k_cache and v_cache[P, page, KV, D]; table int32[B, W], the pages of each request in the order of its
    tokens; request b owns the rows cu_extend[b] : cu_extend[b + 1] of q (int32[B + 1]), which are the last of its
    seq_lens[b] tokens (int32[B]). Query head h reads KV head h // (H / KV). Returns [T, H, D].
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    bounds, page, group = cu_extend.tolist(), k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for b, length in enumerate(seq_lens.tolist()):
        start, end = bounds[b], bounds[b + 1]
        if start == end:
            continue
        pages = table[b, : -(-length // page)].long()
        k, v = (
            cache[pages].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )
        mask = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        rows = scaled_dot_product_attention(q[start:end].transpose(0, 1), k, v, attn_mask=mask, scale=scale)
        out[start:end] = rows.transpose(0, 1)
    return out


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write k and v[T, KV, D] to slots int64[T] of the caches [P, page, KV, D]: page * page_size + offset."""
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x[T, N] with weight[N], or x[T, heads, N] with weight[N] or [heads, N], normalised over N, times weight.

    With residual[T, N] that becomes residual + x, in place, and the sum is normalised. Statistics are float32.
    """
    if residual is not None:
        x = residual.add_(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype) * weight


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x[T, heads, D]; cos and sin[T, 1, D], the first half of sin carrying the minus sign of the rotation."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x[T, 2 I] = [gate | up]; returns [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """int64[R]: where each row of logits[R, V] has its first maximum."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class CpuOps:
    """One implementation of every operator; the functions above say what each does."""

    paged_attention: Callable[..., torch.Tensor] = paged_attention
    store_kv: Callable[..., None] = store_kv
    rms_norm: Callable[..., torch.Tensor] = rms_norm
    rotary: Callable[..., torch.Tensor] = rotary
    silu_and_mul: Callable[..., torch.Tensor] = silu_and_mul
    argmax_rows: Callable[..., torch.Tensor] = argmax_rows
