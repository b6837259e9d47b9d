"""Linear layers whose weight is reordered once, so that every call reads it in the order in which it is used.

``F.linear`` reorders the weight, or falls back to a slower kernel, on every call. Two ways to do better, both probed for
right results before they are trusted: an operator of our own (linear.cpp), on processors for which it is written, and
else the operators of oneDNN behind torch.compile's freezing, which are private to torch. ``torch_linear`` is both the
fallback and the definition.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Callable

import torch

from common.cpu.native import native_ops

Linear = Callable[[torch.Tensor], torch.Tensor]

# Largest relative error (norm of the difference / norm of the float64 result) of a result that counts as right.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HUGE_PAGE = 2**21  # bytes


class PackedLinear:
    """y[T, out] = x[T, in] @ weight[out, in].T + bias[out], on a CPU. Does not keep the weight it was made from."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        panel = panel_of(weight.dtype)
        if panel and weight.shape[1] % panel[1] == 0:
            self._linear = panel_linear(narrowed(weight), bias, *panel)
        else:
            self._linear = onednn_linear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


@functools.cache
def panel_of(dtype: torch.dtype) -> tuple[int, int] | None:
    """(columns, elements of a word) of the compiled operator's layout; None where it is not to be used."""
    if native_ops() is None:
        return None
    panel = torch.ops.minisgl_cpu.panel_of(dtype)
    return (panel[0], panel[1]) if panel else None


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight as bfloat16 if that is exactly the same numbers, as with most checkpoints: half the bytes to read,
    and reading the weights is what a step of few rows spends its time on. Any other weight as it is."""
    if weight.dtype is not torch.float32:
        return weight
    narrow = torch.empty(weight.shape, dtype=torch.bfloat16)
    for rows, fewer in zip(weight.split(4096), narrow.split(4096), strict=True):
        fewer.copy_(rows)
        if not torch.equal(fewer.float(), rows):
            return weight
    return narrow


def panel_linear(weight: torch.Tensor, bias: torch.Tensor | None, columns: int, word: int) -> Linear:
    """By the compiled operator: weight[out, in] becomes [panels, words, columns, word], the last panel filled with zeros."""
    out, inner = weight.shape
    panels = -(-out // columns)
    packed = lazy_zeros((panels, inner // word, columns, word), weight.dtype, huge_pages=True)
    whole = out // columns
    # A word moves as one element: bfloat16 in pairs are int32.
    element = torch.int32 if weight.dtype.itemsize * word == 4 else torch.int16
    words = weight.contiguous().view(element)
    by_row = packed.view(element).squeeze(-1).transpose(1, 2)  # [panels, columns, words]
    by_row[:whole].copy_(words[: whole * columns].view(whole, columns, inner // word))
    if whole < panels:
        by_row[whole, : out - whole * columns].copy_(words[whole * columns :])
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, panels * columns - out))
    linear = torch.ops.minisgl_cpu.linear.default
    return lambda x: linear(x, packed, padded, out)


def onednn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """By oneDNN, in its own blocked layout."""
    # Packed for one row: decoding is where the layout matters most; many rows lose nothing measurable by it.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, bias, "none", [], "")


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The same linear by ``F.linear``: the definition, on any device."""
    return functools.partial(torch.nn.functional.linear, weight=weight, bias=bias)


@functools.cache
def packed_linear_works(dtype: torch.dtype) -> bool:
    """True if this torch and this processor compute packed linears of this dtype rightly."""
    if dtype not in TOLERANCE or not (panel_of(dtype) or torch.backends.mkldnn.is_available()):
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        for rows, out, inner, with_bias in ((1, 96, 80, True), (7, 33, 64, False), (40, 128, 48, True)):
            x = torch.randn(rows, inner, generator=generator).to(dtype)
            weight = torch.randn(out, inner, generator=generator).to(dtype)
            bias = torch.randn(out, generator=generator).to(dtype) if with_bias else None
            want = torch_linear(weight.double(), None if bias is None else bias.double())(x.double())
            got = PackedLinear(weight, bias)(x).double()
            if not (got - want).norm() <= TOLERANCE[dtype] * want.norm():
                return False
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


@functools.cache
def has_native_bf16() -> bool:
    """True if the processor multiplies bfloat16 in hardware (AVX-512 BF16, AMX, or Arm's BF16 extension)."""
    found = torch.cpu.get_capabilities()
    on_arm = found.get("bf16") and torch.backends.mkldnn.is_available()  # without oneDNN nobody would use it
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or on_arm)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, huge_pages: bool = False) -> torch.Tensor:
    """Zeros on the CPU whose memory is taken when it is first written; torch.zeros writes all of it.

    huge_pages: for what is written once, whole, and read all the time, like weights. A KV cache is better without: it
    is one region per layer, all of which grow together, so that the step that crosses into the next huge page would
    have the system clear 2 MiB for the keys and the values of each layer at once, 120 MiB with SmolLM2.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot reserve {size} bytes ({reason}): name less with kv_memory or max_running") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
