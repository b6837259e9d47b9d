"""A quick look at compiled operators before anything relies on them: one small case of each, against its definition."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.cpu.definitions import CpuOps

# Largest error, relative to the largest element of the definition's result, that counts as right.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def first_wrong(ops: CpuOps) -> str | None:
    """The name of the first operator that raises or differs from its definition; None if all are right."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second thread can take longer on a busy machine than all of this
    try:
        with torch.inference_mode():
            wrong = [
                f"{name} in {dtype}" for dtype in TOLERANCE for name in cases(dtype) if not right(ops, name, dtype)
            ]
    finally:
        torch.set_num_threads(threads)
    return wrong[0] if wrong else None


def right(ops: CpuOps, name: str, dtype: torch.dtype) -> bool:
    """Whether one operator does on its case what its definition does."""
    arguments = cases(dtype)[name]
    try:
        got = outcome(getattr(ops, name), arguments())
    except RuntimeError:
        return False
    want = outcome(getattr(CpuOps(), name), arguments())
    return all(close(a, b, TOLERANCE[dtype]) for a, b in zip(got, want, strict=True))


def cases(dtype: torch.dtype) -> dict[str, Callable[[], tuple]]:
    """Operator name -> a function that makes its arguments, the same at every call."""

    def random(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=generator).to(dtype)

    # One decode and one extend of two requests; pages of 16 in no order; three query heads share a KV head.
    table = torch.tensor([[3, 0, 5, 1, 4], [6, 2, 0, 0, 0]], dtype=torch.int32)
    bounds = torch.tensor([0, 1, 8], dtype=torch.int32)
    lengths = torch.tensor([70, 20], dtype=torch.int32)
    slots = torch.tensor([2, 9, 4])
    return {
        "paged_attention": lambda: (
            random(8, 6, 64), random(7, 16, 2, 64), random(7, 16, 2, 64), table, bounds, lengths, 0.125,
        ),
        "store_kv": lambda: (random(3, 2, 24), random(3, 2, 24), random(2, 5, 2, 24), random(2, 5, 2, 24), slots),
        "rms_norm": lambda: (random(3, 72), random(72), 1e-5, random(3, 72)),
        "rotary": lambda: (random(3, 5, 24), random(3, 1, 24), random(3, 1, 24)),
        "silu_and_mul": lambda: (random(3, 144),),
        "argmax_rows": lambda: (random(3, 1000),),
    }  # fmt: skip


def outcome(function: Callable, arguments: tuple) -> list[torch.Tensor]:
    """The result, and the arguments, some of which the operator writes into."""
    result = function(*arguments)
    tensors = [result, *arguments]
    return [t for t in tensors if isinstance(t, torch.Tensor)]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if not want.is_floating_point():
        return torch.equal(got, want)
    error = (got.float() - want.float()).abs().max()
    return got.dtype == want.dtype and bool(error <= tolerance * want.float().abs().max())
