"""Random cases for a chapter's Triton kernels, each run and compared with plain torch on the same device.

Tests run them in Triton's interpreter, `python -m common.gpu_check` on a GPU. Every check returns the largest relative
error of a row, to be held against BOUNDS, and raises AssertionError for what no rounding explains: an output that was
not written, a cache slot that should have stayed as it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

# Norm of a row's error over the norm of the row: rounding of the inputs' type, no more.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """``group`` query heads share each of ``kv_heads`` key and value heads of ``dim`` numbers."""

    kv_heads: int
    group: int
    dim: int


class Cases:
    """Draws from one seed, on one device; ``ops`` and ``kernels`` are the chapter's modules of these names."""

    def __init__(self, kernels: ModuleType, ops: ModuleType, seed: int, device: str = "cpu") -> None:
        self.kernels, self.ops, self.device = kernels, ops, device
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=self.generator, device=self.device) * scale).to(dtype)

    def integers(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def lengths(self, count: int, page: int, longest: int | None = None) -> list[int]:
        """Up to three pages and a token, the edges of a page among them."""
        edges = [1, page, page + 1, 2 * page, 3 * page + 1]
        top = longest or max(3 * page + 1, 80)
        return [self.rng.choice([*edges, self.rng.randint(1, top), self.rng.randint(1, top)]) for _ in range(count)]

    def attention(
        self,
        heads: Heads,
        dtype: torch.dtype,
        page: int,
        lengths: Sequence[int],
        extends: Sequence[int],
        splits: int = 1,
    ) -> float:
        """Prefill where a request has several rows, else decode; length 0 with one row is a padding row of zeros."""
        pages = [-(-n // page) for n in lengths]
        spare = 2  # never in a table except as its padding: a read of them would show as NaN
        shuffled = self.rng.sample(range(sum(pages) + spare), sum(pages) + spare)
        hole = shuffled[0]
        width = max(pages) + 1
        table, taken = [], spare
        for count in pages:
            table.append(shuffled[taken : taken + count] + [hole] * (width - count))
            taken += count
        caches = torch.full(
            (2, len(shuffled), page, heads.kv_heads, heads.dim), torch.nan, dtype=dtype, device=self.device
        )
        for row, n in zip(table, lengths, strict=True):
            slots = self.integers([row[i // page] * page + i % page for i in range(n)], torch.int64)
            for cache in caches:
                cache.flatten(0, 1)[slots] = self.normal(n, heads.kv_heads, heads.dim, dtype=dtype)
        bounds = [sum(extends[:i]) for i in range(len(extends) + 1)]
        count = heads.kv_heads * heads.group
        wider = self.normal(bounds[-1], count + 2, heads.dim, dtype=dtype, scale=2.0)
        q, scale = wider[:, 1:-1], heads.dim**-0.5
        tensors = self.integers(table), self.integers(bounds), self.integers(lengths)
        out = torch.full(q.shape, torch.nan, dtype=dtype, device=self.device)
        if max(extends) == 1:
            self.kernels.paged_decode(q, *caches, tensors[0], tensors[2], scale, splits, out)
        else:
            self.kernels.paged_prefill(q, *caches, *tensors, scale, max(extends), splits, out)
        return error(out, paged_attention(q, caches[0], caches[1], *tensors, scale))

    def store_kv(self, heads: Heads, dtype: torch.dtype, page: int, tokens: int, padding: int = 0) -> float:
        """The last ``padding`` tokens have no slot. Everything but the slots named must stay as it was."""
        pages = tokens // page + 3
        slots = self.rng.sample(range(pages * page), tokens)
        slots[tokens - padding :] = [-1] * padding
        both = self.normal(tokens, 3 * heads.kv_heads, heads.dim, dtype=dtype)  # as in the matrix of a layer
        k, v = both[:, heads.kv_heads : 2 * heads.kv_heads], both[:, 2 * heads.kv_heads :]
        before = self.normal(2, pages, page, heads.kv_heads, heads.dim, dtype=dtype)
        after = before.clone()
        self.kernels.store_kv(k, v, *after, self.integers(slots, torch.int64))
        used = self.integers(slots[: tokens - padding], torch.int64)
        for cache, new in zip(before, (k, v), strict=True):
            cache.flatten(0, 1)[used] = new[: tokens - padding]
        assert torch.equal(before, after), "a slot holds the wrong values or was touched without need"
        return 0.0

    def add_rms_norm(self, dtype: torch.dtype, rows: int, size: int, heads: int = 0, residual: bool = False) -> float:
        """``heads`` 0: x[rows, size]; else x[rows, heads, size] with a weight per head, as a view of a wider matrix."""
        shape = (rows, heads, size) if heads else (rows, size)
        x = self.normal(rows, heads + 2, size, dtype=dtype)[:, 1:-1] if heads else self.normal(*shape, dtype=dtype)
        weight = 1 + self.normal(*shape[1:], dtype=dtype, scale=0.1)
        before = self.normal(*shape, dtype=dtype) if residual else None
        sums = [None if before is None else before.clone() for _ in range(2)]
        want, want_sum = self.ops.rms_norm(x.clone(), weight, EPS, sums[0])
        got, got_sum = self.kernels.add_rms_norm(x, weight, EPS, sums[1])
        assert got_sum is (x if sums[1] is None else sums[1]), "the sum is kept in place"
        assert torch.equal(got_sum, want_sum), "the sum is rounded once, as in torch"
        return error(got, want)

    def rotary(self, dtype: torch.dtype, tokens: int, heads: int, dim: int) -> float:
        x = self.normal(tokens, heads + 1, dim, dtype=dtype)[:, :-1]
        cos, sin = (self.normal(tokens, 1, dim, dtype=dtype).clamp(-1, 1) for _ in range(2))
        want = self.ops.rotary(x.float(), cos.float(), sin.float())
        return error(self.kernels.rotary(x, cos, sin), want)

    def silu_and_mul(self, dtype: torch.dtype, tokens: int, size: int) -> float:
        x = self.normal(tokens, 2 * size, dtype=dtype)
        return error(self.kernels.silu_and_mul(x), self.ops.silu_and_mul(x.float()))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest over all rows of |got - want| / |want|; a row that should be zero must be."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not got.numel():
        return 0.0
    assert bool(torch.isfinite(got).all()), "some of the output was not written, or comes from memory that nobody wrote"
    difference, size = (got.double() - want.double()).norm(dim=-1), want.double().norm(dim=-1)
    assert not bool(difference[size == 0].any()), "a padding row is not zero"
    return float((difference / size.clamp_min(1e-30)).max())


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    cu_extend: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What the attention kernels compute, in float64 and request by request: shapes as in paged_prefill."""
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = cu_extend.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        first, last = bounds[b], bounds[b + 1]
        if not length:
            continue
        place = torch.arange(length, device=q.device)
        slots = table[b].long()[place // page] * page + place % page
        keys, values = (c.flatten(0, 1)[slots].double().repeat_interleave(group, 1) for c in (k_cache, v_cache))
        score = torch.einsum("qhd,nhd->hqn", q[first:last].double(), keys) * scale
        position = length - (last - first) + torch.arange(last - first, device=q.device)
        score = score.masked_fill(place > position[:, None], -torch.inf)
        out[first:last] = torch.einsum("hqn,nhd->qhd", score.softmax(-1), values)
    return out
