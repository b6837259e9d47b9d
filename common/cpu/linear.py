"""Linear layers whose weight is reordered once into the blocked layout that oneDNN computes in.

``F.linear`` reorders the weight, or falls back to a slower kernel, on every call. The operators used here are the ones
behind torch.compile's freezing; they are private to torch, so they are probed for right results before they are trusted,
and ``torch_linear`` is both the fallback and the definition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

Linear = Callable[[torch.Tensor], torch.Tensor]

# Largest relative error (norm of the difference / norm of the float64 result) of a result that counts as right.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class PackedLinear:
    """y[T, out] = x[T, in] @ weight[out, in].T + bias[out], on a CPU. Does not keep the weight it was made from."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        # Packed for one row: decoding is where the layout matters most; many rows lose nothing measurable by it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The same linear by ``F.linear``: the definition, on any device."""
    return functools.partial(torch.nn.functional.linear, weight=weight, bias=bias)


@functools.cache
def packed_linear_works(dtype: torch.dtype) -> bool:
    """True if this torch and this processor compute packed linears of this dtype rightly."""
    if dtype not in TOLERANCE or not torch.backends.mkldnn.is_available():
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
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(check() for check in (getattr(torch.cpu, name, None) for name in checks) if check)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose memory is taken page by page when it is first written; torch.zeros writes all of it."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
