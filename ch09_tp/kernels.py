"""The GPU path of the model in Triton. Every kernel has a definition in plain torch, which its wrapper names.

Import this module only where it is used: it needs Triton. Wrappers choose blocks and grids from shapes alone, read no
tensor and never synchronise, so that all of them may run while a CUDA graph is captured.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634  # the kernels use exp2, which is the instruction the hardware has
MAX_SPLITS = 32
SPLIT_TOKENS = 256  # a program with fewer tokens than this costs more to start than it saves


@triton.jit
def _store_kv(
    k, v, k_cache, v_cache, slots, k_token, k_head, v_token, v_head, slot_stride, head_stride,
    KV: tl.constexpr, D: tl.constexpr, KV_PAD: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One program per token: all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head, dim = tl.arange(0, KV_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
        inside = (head < KV) & (dim < D)
        place = slot * slot_stride + head * head_stride + dim
        keys = tl.load(k + token * k_token + head * k_head + dim, mask=inside)
        values = tl.load(v + token * v_token + head * v_head + dim, mask=inside)
        tl.store(k_cache + place, keys, mask=inside)
        tl.store(v_cache + place, values, mask=inside)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write k and v[T, KV, D] to slots int64[T] of the caches [P, page, KV, D]; a slot below 0 is not written.

    k and v may be views into a larger matrix. The definition is KVCache.store.
    """
    count, kv_heads, dim = k.shape
    slot_stride, head_stride = _cache_strides(k_cache)
    assert _cache_strides(v_cache) == (slot_stride, head_stride) and k.stride(2) == v.stride(2) == 1
    if count:
        _store_kv[(count,)](
            k, v, k_cache, v_cache, slots, *k.stride()[:2], *v.stride()[:2], slot_stride, head_stride,
            KV=kv_heads, D=dim, KV_PAD=_pad(kv_heads), D_PAD=_pad(dim),
        )  # fmt: skip


@triton.jit
def _attend(
    q, k_cache, v_cache, table, cu_extend, seq_lens, out, partial, logsum, scale,
    q_token, q_head, slot_stride, head_stride, table_stride,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    DECODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of BLOCK_M rows over one part of their request's tokens, online softmax (Milakov 2018).

    A row is one query of one head; the heads of a group are neighbours, so that one load of K and V serves them all,
    and a group of 3 or 5 leaves no hole in the tile. Grid: tiles * SPLITS, KV heads, requests.
    """
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    kv_head, request = tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    if DECODE:
        first, extend = request, 1
    else:
        first = tl.load(cu_extend + request)
        extend = tl.load(cu_extend + request + 1) - first
    if tile * BLOCK_M >= extend * GROUP:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    position = seq_len - extend + query  # the last token that the row sees
    dim = tl.arange(0, D_PAD)[None, :]
    inside = (query < extend)[:, None] & (dim < D)
    token = (first + query).to(tl.int64)
    queries = tl.load(q + (token * q_token + head * q_head)[:, None] + dim, mask=inside, other=0.0)

    # This program's tokens: a multiple of BLOCK_N, cut where the tile's last row stops to see.
    share = tl.cdiv(tl.cdiv(seq_len, SPLITS), BLOCK_N) * BLOCK_N
    start = split * share
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, extend - 1)
    stop = tl.minimum(start + share, seq_len - extend + last + 1)
    pages = table + request.to(tl.int64) * table_stride
    # A finite start: the difference of two infinite maxima would be NaN. A row that sees nothing keeps it, and weighs 0.
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for begin in range(start, stop, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        exists = n < stop
        page = tl.load(pages + n // PAGE, mask=exists, other=0).to(tl.int64)
        place = ((page * PAGE + n % PAGE) * slot_stride + kv_head * head_stride)[:, None] + dim
        there = exists[:, None] & (dim < D)
        keys = tl.load(k_cache + place, mask=there, other=0.0)
        values = tl.load(v_cache + place, mask=there, other=0.0)
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        score = tl.where(exists[None, :] & (n[None, :] <= position[:, None]), score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - highest[:, None])
        fade = tl.exp2(top - highest)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        top = highest

    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None]
    cell = token * (tl.num_programs(1) * GROUP) + head
    if SPLITS == 1:
        tl.store(out + cell[:, None] * D + dim, result.to(out.dtype.element_ty), mask=inside)
    else:
        cell = cell * SPLITS + split
        tl.store(logsum + cell, top + tl.log2(total), mask=query < extend)
        tl.store(partial + cell[:, None] * D + dim, result, mask=inside)


@triton.jit
def _reduce(partial, logsum, out, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """Join the parts of one row, each weighted by its share of the softmax's denominator; no part: zeros."""
    row = tl.program_id(0).to(tl.int64)
    cell, dim = row * SPLITS + tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    logs = tl.load(logsum + cell)
    weight = tl.exp2(logs - tl.max(logs, 0))
    parts = tl.load(partial + cell[:, None] * D + dim[None, :], mask=(dim < D)[None, :], other=0.0)
    result = tl.sum(weight[:, None] * parts, 0) / tl.sum(weight, 0)
    tl.store(out + row * D + dim, result.to(out.dtype.element_ty), mask=dim < D)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query per request: q[B, H, D] over seq_lens[b] tokens in the pages table[b] -> [B, H, D].

    Caches are [P, page, KV, D], table int32[B, W] of which the first ceil(seq_len / page) entries are read, seq_lens
    int32[B]. A request with no tokens (a padding row) gets zeros. ``splits`` programs (None: see choose_splits) share a
    request's tokens and a second kernel joins them. The definition is TorchBackend.attend.
    """
    return _attention(q, k_cache, v_cache, table, None, seq_lens, scale, 1, splits, out)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    cu_extend: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_extend: int,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last rows of each request: q[T, H, D], rows cu_extend[b] : cu_extend[b + 1] are its last tokens -> [T, H, D].

    Each row sees the request's tokens up to itself: whole prompts, chunks after a cached prefix, and single tokens
    between them. cu_extend int32[B + 1] covers all T rows, max_extend is at least the longest of them;
    the rest as in paged_decode. The definition is TorchBackend.attend.
    """
    return _attention(q, k_cache, v_cache, table, cu_extend, seq_lens, scale, max_extend, splits, out)


def _attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    cu_extend: torch.Tensor | None,
    seq_lens: torch.Tensor,
    scale: float,
    max_extend: int,
    splits: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    count, heads, dim = q.shape
    kv_heads, group = k_cache.shape[2], heads // k_cache.shape[2]
    slot_stride, head_stride = _cache_strides(k_cache)
    assert _cache_strides(v_cache) == (slot_stride, head_stride) and q.stride(2) == table.stride(1) == 1
    out = q.new_empty(q.shape) if out is None else out
    assert out.is_contiguous()
    if not count:
        return out
    block_m, block_n, warps, stages = attention_blocks(max_extend * group, dim, q.dtype)
    tiles, page = triton.cdiv(max_extend * group, block_m), k_cache.shape[1]
    splits = splits or choose_splits(tiles * kv_heads * len(seq_lens), table.shape[1] * page, _processors(q.device))
    partial = logsum = None
    if splits > 1:
        partial = q.new_empty(count, heads, splits, dim, dtype=torch.float32)
        logsum = q.new_empty(count, heads, splits, dtype=torch.float32)
    _attend[(tiles * splits, kv_heads, len(seq_lens))](
        q, k_cache, v_cache, table, cu_extend, seq_lens, out, partial, logsum, scale * LOG2E,
        *q.stride()[:2], slot_stride, head_stride, table.stride(0),
        GROUP=group, D=dim, D_PAD=_pad(dim), PAGE=page, SPLITS=splits, DECODE=cu_extend is None,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _reduce[(count * heads,)](partial, logsum, out, D=dim, D_PAD=_pad(dim), SPLITS=splits)
    return out


def attention_blocks(rows: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(rows of a tile, tokens per iteration, warps, pipeline stages) for tiles of ``rows`` rows at most.

    Compiled for every supported chip without spilled registers; 16 rows are the least that tensor cores take.
    """
    if dtype == torch.float32:  # no tensor cores: the products live in registers
        return 16, 32, 8 if dim > 64 else 4, 2
    block_m = min(max(_pad(rows), 16), 128 if dim == _pad(dim) else 64)
    block_n = 32 if block_m > 16 and dim > 64 else 64
    # Stages are taken by the chain page table -> page -> keys: five leave two tiles of keys in flight.
    return block_m, block_n, 8 if block_m == 128 else 4, 5


def choose_splits(programs: int, max_len: int, processors: int) -> int:
    """Parts (a power of two) of requests with up to max_len tokens, so that ``programs`` fill a GPU about twice.

    Depends on shapes only: a captured graph is right for every length.
    """
    wanted = min(2 * processors // programs, max_len // SPLIT_TOKENS, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, rows, x_token, x_head, weight_head, eps,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    dim = tl.arange(0, D_PAD)[None, :]
    inside = (row < rows)[:, None] & (dim < D)
    place = row.to(tl.int64)[:, None] * D + dim
    value = tl.load(x + (token * x_token + head * x_head)[:, None] + dim, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (value + tl.load(residual + place, mask=inside, other=0.0)).to(residual.dtype.element_ty)
        tl.store(residual + place, total, mask=inside)
        value = total.to(tl.float32)  # what the definition normalises is the rounded sum
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    normed = (value * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + (head * weight_head)[:, None] + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (normed * factor).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x[T, D] with weight[D], or x[T, heads, D] with weight[heads, D]; the definition is ops.rms_norm.

    With ``residual`` (contiguous) x is added to it in place. Returns (normalised, the sum that was normalised).
    """
    heads, dim = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    rows = len(x) * heads
    assert x.stride(-1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out = x.new_empty(x.shape)
    block = _pad(dim)
    several = max(1, 1024 // block)  # short rows, as of one head, share a program
    if rows:
        _add_rms_norm[(triton.cdiv(rows, several),)](
            x, residual, weight, out, rows, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
            dim if weight.dim() == 2 else 0, eps,
            HEADS=heads, D=dim, D_PAD=block, ROWS=several, ADD=residual is not None, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out, x if residual is None else residual


@triton.jit
def _rotary(
    x, cos, sin, out, x_token, x_head, HEADS: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per token and block of heads; cos and sin are read once for all of them."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    half = D // 2
    low, high = token * D + dim, token * D + dim + half
    place = token * x_token + head * x_head + dim
    inside = (head < HEADS) & (dim < half)
    a = tl.load(x + place, mask=inside).to(tl.float32)
    b = tl.load(x + place + half, mask=inside).to(tl.float32)
    cos_a, cos_b = tl.load(cos + low, mask=dim < half), tl.load(cos + high, mask=dim < half)
    sin_a, sin_b = tl.load(sin + low, mask=dim < half), tl.load(sin + high, mask=dim < half)
    place = (token * HEADS + head) * D + dim
    tl.store(out + place, (a * cos_a + b * sin_a).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + half, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=inside)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x[T, heads, D] (may be a view) with cos and sin[T, 1, D] -> [T, heads, D]; the definition is ops.rotary."""
    count, heads, dim = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    out = x.new_empty(x.shape)
    block = min(_pad(heads), 16)
    if count:
        _rotary[(count, triton.cdiv(heads, block))](
            x, cos, sin, out, *x.stride()[:2], HEADS=heads, D=dim, HALF_PAD=_pad(dim // 2), BLOCK=block
        )
    return out


@triton.jit
def _silu_and_mul(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    gate = tl.load(x + token * 2 * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * SIZE + SIZE + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for contiguous x[T, 2 I] = [gate | up] -> [T, I]; the definition is ops.silu_and_mul."""
    assert x.is_contiguous()
    count, size = len(x), x.shape[1] // 2
    out = x.new_empty(count, size)
    block = min(_pad(size), 1024)
    if count:
        _silu_and_mul[(count, triton.cdiv(size, block))](x, out, SIZE=size, BLOCK=block)
    return out


def _pad(size: int) -> int:
    return triton.next_power_of_2(size)


def _cache_strides(cache: torch.Tensor) -> tuple[int, int]:
    """Elements from one slot to the next and from one head to the next; pages must follow each other without gaps."""
    page, slot, head, dim = cache.stride()
    assert page == cache.shape[1] * slot and dim == 1, "a KV cache must be one block of slots"
    return slot, head
