"""The small operations of the decoder. Each function here is the definition; choose() picks what really runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common import cpu

Linear = Callable[[torch.Tensor], torch.Tensor]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension to root mean square 1, times weight (Zhang & Sennrich 2019).

    With ``residual`` x is first added to it, in place. Returns (normalised, the sum that was normalised); statistics are
    float32 for any dtype.
    """
    if residual is not None:
        x = residual.add_(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype) * weight, x


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x[T, heads, D] by position (Su et al. 2021), the pair of dimension i being i + D/2.

    cos[T, 1, D] and sin[T, 1, D]; the first half of sin carries the minus sign of the rotation, so that the swap of
    halves is a plain roll. Query and key heads go through one call.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x[T, 2 I] = [gate | up] (SwiGLU, Shazeer 2020). Returns [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64[R]: the first of the largest of each row of logits[R, V]."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations one model runs with."""

    linear: Callable[
        [torch.Tensor, torch.Tensor | None], Linear
    ]  # (weight[out, in], bias[out]) -> x[T, in] -> y[T, out]
    rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rms_norm
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotary
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul
    argmax: Callable[[torch.Tensor], torch.Tensor] = argmax


def choose(device: torch.device, dtype: torch.dtype, native: bool) -> Ops:
    """The fastest operations that are right on this machine; ``native`` False keeps to plain torch."""
    if not native or device.type != "cpu":
        return Ops(cpu.torch_linear)
    linear = cpu.PackedLinear if cpu.packed_linear_works(dtype) else cpu.torch_linear
    compiled = cpu.native_ops()
    if compiled is None:
        return Ops(linear)

    def compiled_rms_norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return compiled.rms_norm(x, weight, eps, residual), x if residual is None else residual

    return Ops(linear, compiled_rms_norm, compiled.rotary, compiled.silu_and_mul, compiled.argmax_rows)
