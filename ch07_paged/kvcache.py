"""Keys and values of computed tokens are kept here, so that no token is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.cpu import lazy_zeros

from .core import Batch, Req


class KVCache:
    """Paged cache (Kwon et al. 2023): a request owns as many small pages as its tokens fill, anywhere in the pool.

    Ownership: a page is either in ``_free`` or in exactly one ``req.pages``. Token i of a request lies in page
    ``pages[i // page_size]`` at offset ``i % page_size``. Its first ``req.cached_len`` positions hold keys and values,
    the next ones are written by the step in flight, and what lies beyond counts for nobody. The scheduler allocates
    and frees; attention reads and writes.
    """

    def __init__(
        self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, like: torch.Tensor
    ) -> None:
        """like: a tensor of the model's device and dtype."""
        self.num_pages, self.page_size = pages, page_size
        # Zeros: whoever reads several requests at once gives what nobody has written a weight of 0, and 0 times NaN is NaN.
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.k, self.v = (
            lazy_zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_zeros(shape) for _ in range(2)
        )
        self._free = list(range(pages - 1, -1, -1))
        self._owned = 0
        self._is_owned = [False] * pages  # finds pages that are taken or freed twice

    def pages_needed(self, req: Req, n: int) -> int:
        """Pages to take from the pool before n more tokens after req.cached_len have a place."""
        return max(0, -(-(req.cached_len + n) // self.page_size) - len(req.pages))

    def can_allocate(self, req: Req, n: int) -> bool:
        """Whether n more tokens after req.cached_len would have a place."""
        return self.pages_needed(req, n) <= len(self._free)

    def allocate(self, req: Req, n: int) -> None:
        """Give req the place that n more tokens after req.cached_len need; ask can_allocate first."""
        assert self.can_allocate(req, n), f"request {req.rid}: no place for {n} tokens"
        for _ in range(self.pages_needed(req, n)):
            page = self._free.pop()
            assert not self._is_owned[page], f"page {page} was in the pool and owned"
            self._is_owned[page] = True
            self._owned += 1
            req.pages.append(page)

    def free(self, req: Req) -> None:
        """Take back all that req owns; its keys and values are gone."""
        self.truncate(req, 0)

    def truncate(self, req: Req, length: int) -> None:
        """Forget the keys and values of tokens from ``length`` on and take back the pages that held only them."""
        req.cached_len = min(req.cached_len, length)
        keep = -(-length // self.page_size)
        while len(req.pages) > keep:
            page = req.pages.pop()
            assert self._is_owned[page], f"page {page} is freed twice"
            self._is_owned[page] = False
            self._owned -= 1
            self._free.append(page)

    def match(self, req: Req) -> int:
        """How many of req's first tokens are cached although it does not run: none, no request leaves anything behind."""
        return 0

    def attach(self, req: Req) -> None:
        """req begins to run: let it own what match() found."""
        req.cached_len = self.match(req)

    def commit(self, req: Req) -> None:
        """The first req.cached_len tokens of a request that goes on are computed: they could serve others, too."""

    def finish(self, req: Req) -> None:
        """The request is over: take back what it owns."""
        self.free(req)

    def table(self, reqs: Sequence[Req]) -> list[list[int]]:
        """The pages of each request in the order of its tokens, padded with 0 to one length P: [B, P]."""
        width = max(len(req.pages) for req in reqs)
        return [req.pages + [0] * (width - len(req.pages)) for req in reqs]

    def slots(self, batch: Batch) -> list[int]:
        """Where the keys and values of each token of this step go: page * page_size + offset, one per token."""
        size, slots = self.page_size, []
        for item in batch.items:
            start, pages = item.req.cached_len, item.req.pages
            slots += [pages[at // size] * size + at % size for at in range(start, start + item.extend_len)]
        return slots

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write k and v[T, KV, D] to slots int64[T]."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def owned(self, req: Req) -> int:
        """Pages that no one but req holds."""
        return len(req.pages)

    def used(self, running: Sequence[Req]) -> int:
        """Positions that hold keys and values of running requests."""
        return sum(req.cached_len for req in running)

    def ledger(self) -> dict[str, int]:
        """Pages by owner; free + cached + owned = total, always."""
        return {"free": len(self._free), "cached": 0, "owned": self._owned, "total": self.num_pages}


def token_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


def pages_for(wanted: int, budget: int | None, page_bytes: int) -> int:
    """Pages that fit into budget bytes (None: as many as wanted); ValueError if not even one does."""
    fit = wanted if budget is None else min(wanted, budget // page_bytes)
    if fit < 1:
        raise ValueError(f"kv_memory {budget} bytes is less than one page takes: {page_bytes} bytes")
    return fit
