"""The weight-bearing layers by their role in the decoder. Each knows how checkpoint tensors fill it.

A layer is built empty, filled by load() tensor by tensor, and made ready by finish(), which may repack the weight and
drop the copy that was filled.
"""

from __future__ import annotations

from typing import Any

import torch

from .ops import Linear, Ops


def fill(target: torch.Tensor, source: Any) -> None:
    """Copy a whole checkpoint slice; ValueError for another shape, also for one that would broadcast."""
    if tuple(source.shape) != tuple(target.shape):
        raise ValueError(f"expected {tuple(target.shape)}")
    target.copy_(source[:])


class StackedLinear:
    """Several matrices with one input, stacked by rows, so that they are one product: a part is so many rows."""

    def __init__(self, parts: dict[str, int], inner: int, bias: bool, like: torch.Tensor) -> None:
        self.parts = parts
        out = sum(parts.values())
        self.weight: torch.Tensor | None = like.new_empty(out, inner)
        self.bias = like.new_zeros(out) if bias else None
        self._linear: Linear | None = None

    def load(self, part: str, kind: str, source: Any) -> None:
        """Fill one part's "weight" or "bias" from a checkpoint slice."""
        start = 0
        for name, size in self.parts.items():
            if name == part:
                target = self.weight if kind == "weight" else self.bias
                assert target is not None
                fill(target[start : start + size], source)
            start += size

    def finish(self, ops: Ops) -> None:
        assert self.weight is not None
        self._linear = ops.linear(self.weight, self.bias)
        self.weight = None  # a packed layer has its own copy; an unpacked one keeps this tensor alive itself

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x[T, inner] -> [T, sum of parts]."""
        assert self._linear is not None
        return self._linear(x)


class QKVLinear(StackedLinear):
    """Query, key and value projections in one matrix."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool, like: torch.Tensor) -> None:
        super().__init__(
            {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}, hidden, bias, like
        )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, all] -> (queries and keys [T, heads + kv_heads, D], values [T, kv_heads, D]), as views."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return heads[:, : self.heads + self.kv_heads], heads[:, self.heads + self.kv_heads :]


class GateUpLinear(StackedLinear):
    """The two input projections of the feed-forward layer in one matrix."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, like: torch.Tensor) -> None:
        super().__init__({"gate": intermediate, "up": intermediate}, hidden, bias, like)


class RowLinear(StackedLinear):
    """A projection back to the hidden size: attention output and feed-forward down."""

    def __init__(self, inner: int, hidden: int, bias: bool, like: torch.Tensor) -> None:
        super().__init__({"out": hidden}, inner, bias, like)


class LMHead(StackedLinear):
    """Hidden states to one logit per vocabulary entry."""

    def __init__(self, hidden: int, vocab: int, like: torch.Tensor) -> None:
        super().__init__({"out": vocab}, hidden, False, like)


class TokenEmbedding:
    """One row per vocabulary entry."""

    def __init__(self, vocab: int, hidden: int, like: torch.Tensor) -> None:
        self.weight = like.new_empty(vocab, hidden)

    def load(self, source: Any) -> None:
        fill(self.weight, source)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64[T] -> [T, hidden]."""
        return torch.nn.functional.embedding(ids, self.weight)


class Norm:
    """The weight of an RMSNorm, over the hidden size or over one head."""

    def __init__(self, size: int, like: torch.Tensor) -> None:
        self.weight = like.new_empty(size)

    def load(self, source: Any) -> None:
        fill(self.weight, source)
