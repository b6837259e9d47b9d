"""The weight-bearing layers by their role in the decoder. Each knows how checkpoint tensors fill it.

Over several ranks a layer holds a share of the full matrix and reads nothing else: QKVLinear, GateUpLinear and LMHead
some of the rows (outputs), RowLinear the columns (inputs) that the rows before it produce, TokenEmbedding some rows. The
outputs of the last two are partial sums, so they end with an all-reduce: two per decoder layer.

A layer is built empty, filled by load() tensor by tensor, and made ready by finish(), which may repack the weight and
drop the copy that was filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .distributed import ALONE, Group
from .ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a dimension that one rank holds: ``size`` from ``start`` on, of which those beyond ``full`` are padding."""

    start: int
    size: int
    full: int

    @staticmethod
    def of(full: int, group: Group) -> Share:
        """Equal shares, the last ones padded where the dimension does not divide."""
        size = -(-full // group.size)
        return Share(group.rank * size, size, full)

    def times(self, unit: int) -> Share:
        return Share(self.start * unit, self.size * unit, self.full * unit)

    @property
    def there(self) -> slice:
        """Where the share lies in the full dimension, without padding."""
        return slice(min(self.start, self.full), min(self.start + self.size, self.full))


def fill(target: torch.Tensor, source: Any, *shares: Share) -> None:
    """Copy from a checkpoint slice the share of each dimension that has one, and nothing else of it.

    Raises ValueError for another full shape, also for one that would broadcast.
    """
    expected = tuple(share.full for share in shares) + tuple(target.shape[len(shares) :])
    if tuple(source.shape) != expected:
        raise ValueError(f"expected {expected}")
    part = source[tuple(share.there for share in shares) or slice(None)]
    target[: len(part)].copy_(part)


class StackedLinear:
    """Several matrices with one input, stacked by rows, so that they are one product: a part is so many rows."""

    def __init__(self, parts: dict[str, Share], inner: Share, bias: bool, like: torch.Tensor) -> None:
        self.parts, self.inner = parts, inner
        out = sum(share.size for share in parts.values())
        self.weight: torch.Tensor | None = like.new_empty(out, inner.size)
        self.bias = like.new_zeros(out) if bias else None
        self._linear: Linear | None = None

    def load(self, part: str, kind: str, source: Any) -> None:
        """Fill one part's "weight" or "bias" from a checkpoint slice."""
        start = 0
        for name, share in self.parts.items():
            if name == part:
                target = self.weight if kind == "weight" else self.bias
                assert target is not None
                fill(target[start : start + share.size], source, share, *[self.inner] * (kind == "weight"))
            start += share.size

    def finish(self, ops: Ops) -> None:
        assert self.weight is not None
        self._linear = ops.linear(self.weight, self.bias)
        self.weight = None  # a packed layer has its own copy; an unpacked one keeps this tensor alive itself

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x[T, inner] -> [T, sum of parts]."""
        assert self._linear is not None
        return self._linear(x)


class QKVLinear(StackedLinear):
    """Query, key and value projections in one matrix. ``heads`` and ``kv_heads`` are those of this rank.

    Ranks get equal numbers of query heads and the KV heads that these read: with more ranks than KV heads several ranks
    hold the same one.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool, like: torch.Tensor, group: Group
    ) -> None:
        """heads, kv_heads: of the whole model."""
        q = Share.of(heads, group)
        kv = (
            Share.of(kv_heads, group)
            if kv_heads >= group.size
            else Share(group.rank * kv_heads // group.size, 1, kv_heads)
        )
        parts = {"q": q.times(head_dim), "k": kv.times(head_dim), "v": kv.times(head_dim)}
        super().__init__(parts, Share(0, hidden, hidden), bias, like)
        self.heads, self.kv_heads, self.head_dim = q.size, kv.size, head_dim

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, all] -> (queries and keys [T, heads + kv_heads, D], values [T, kv_heads, D]), as views."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return heads[:, : self.heads + self.kv_heads], heads[:, self.heads + self.kv_heads :]


class GateUpLinear(StackedLinear):
    """The two input projections of the feed-forward layer in one matrix."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, like: torch.Tensor, group: Group = ALONE) -> None:
        share = Share.of(intermediate, group)
        super().__init__({"gate": share, "up": share}, Share(0, hidden, hidden), bias, like)


class RowLinear(StackedLinear):
    """A projection back to the hidden size: attention output and feed-forward down. Returns the sum over all ranks."""

    def __init__(self, inner: int, hidden: int, bias: bool, like: torch.Tensor, group: Group = ALONE) -> None:
        super().__init__({"out": Share(0, hidden, hidden)}, Share.of(inner, group), bias, like)
        self.group = group

    def load(self, part: str, kind: str, source: Any) -> None:
        if kind == "weight" or self.group.rank == 0:  # the others add a bias of zeros, so that it counts once
            super().load(part, kind, source)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(super().__call__(x))


class LMHead(StackedLinear):
    """Hidden states to one logit per vocabulary entry: all of them on rank 0, a share on the others."""

    def __init__(self, hidden: int, vocab: int, like: torch.Tensor, group: Group = ALONE) -> None:
        super().__init__({"out": Share.of(vocab, group)}, Share(0, hidden, hidden), False, like)
        self.vocab, self.group = vocab, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.gather(super().__call__(x))[:, : self.vocab]


class TokenEmbedding:
    """One row per vocabulary entry."""

    def __init__(self, vocab: int, hidden: int, like: torch.Tensor, group: Group = ALONE) -> None:
        self.share, self.group = Share.of(vocab, group), group
        self.weight = like.new_empty(self.share.size, hidden)

    def load(self, source: Any) -> None:
        fill(self.weight, source, self.share)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64[T] -> [T, hidden]."""
        if self.group.size == 1:
            return torch.nn.functional.embedding(ids, self.weight)
        rows = ids - self.share.start
        foreign = (rows < 0) | (rows >= self.share.size)
        found = torch.nn.functional.embedding(rows.masked_fill(foreign, 0), self.weight)
        return self.group.all_reduce(found.masked_fill(foreign[:, None], 0))


class Norm:
    """The weight of an RMSNorm, over the hidden size or over one head."""

    def __init__(self, size: int, like: torch.Tensor) -> None:
        self.weight = like.new_empty(size)

    def load(self, source: Any) -> None:
        fill(self.weight, source)
