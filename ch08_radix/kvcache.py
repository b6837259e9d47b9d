"""Keys and values of computed tokens are kept here, so that no token is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.cpu import lazy_zeros

from .core import Batch, Req
from .radix import RadixTree


class KVCache:
    """Paged cache (Kwon et al. 2023): a request owns as many small pages as its tokens fill, anywhere in the pool.

    Ownership: a page is in ``_free``, or in the tree, or owned by exactly one request. ``req.pages`` begins with
    ``req.shared`` pages of the tree, which its lock on ``req.prefix`` protects; the rest it owns. Token i lies in page
    ``pages[i // page_size]`` at offset ``i % page_size``. Its first ``req.cached_len`` positions hold keys and values,
    the next ones are written by the step in flight, and what lies beyond counts for nobody. The scheduler allocates
    and frees; attention reads and writes.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        like: torch.Tensor,
        prefix_cache: bool = True,
    ) -> None:
        """like: a tensor of the model's device and dtype."""
        self.tree = RadixTree(page_size)
        self.prefix_cache = prefix_cache
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
        return self.pages_needed(req, n) <= len(self._free) + self.tree.evictable

    def allocate(self, req: Req, n: int) -> None:
        """Give req the place that n more tokens after req.cached_len need; ask can_allocate first."""
        assert self.can_allocate(req, n), f"request {req.rid}: no place for {n} tokens"
        needed = self.pages_needed(req, n)
        if needed > len(self._free):
            self._free += self.tree.evict(needed - len(self._free))
        for _ in range(needed):
            page = self._free.pop()
            assert not self._is_owned[page], f"page {page} was in the pool and owned"
            self._is_owned[page] = True
            self._owned += 1
            req.pages.append(page)

    def free(self, req: Req) -> None:
        """Take back all that req owns and its lock; what it computed stays in the tree."""
        self.commit(req)
        self.truncate(req, req.shared * self.page_size)
        if req.prefix is not None:
            self.tree.unlock(req.prefix)
        req.pages.clear()
        req.cached_len, req.shared, req.prefix = 0, 0, None

    def truncate(self, req: Req, length: int) -> None:
        """Forget the keys and values of tokens from ``length`` on and take back the pages that held only them."""
        req.cached_len = min(req.cached_len, length)
        keep = -(-length // self.page_size)
        assert keep >= req.shared, f"request {req.rid}: pages of the tree are not its own to give back"
        while len(req.pages) > keep:
            page = req.pages.pop()
            assert self._is_owned[page], f"page {page} is freed twice"
            self._is_owned[page] = False
            self._owned -= 1
            self._free.append(page)

    def match(self, req: Req) -> int:
        """How many of req's first tokens are cached although it does not run. Never the last: its row gives the logits."""
        return self.tree.match(req.token_ids, req.length - 1) if self.prefix_cache else 0

    def attach(self, req: Req) -> None:
        """req begins to run: let it read what match() found, which stays the tree's and is locked."""
        if self.prefix_cache:
            req.prefix, pages = self.tree.lock(req.token_ids, req.length - 1)
            req.pages += pages
            req.shared = len(pages)
            req.cached_len = len(pages) * self.page_size

    def commit(self, req: Req) -> None:
        """Give the full pages that req has computed to the tree; where it has them already, use the tree's."""
        full = req.cached_len // self.page_size
        if not self.prefix_cache or full == req.shared:
            return
        for page in req.pages[req.shared : full]:
            self._is_owned[page] = False
        self._owned -= full - req.shared
        tokens, before = req.token_ids[: full * self.page_size], req.prefix
        for place, own, canonical in self.tree.insert(tokens, req.pages[:full]):
            req.pages[place] = canonical
            self._free.append(own)
        req.prefix, _ = self.tree.lock(tokens, len(tokens))
        req.shared = full
        if before is not None:
            self.tree.unlock(before)

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

    def flush(self) -> None:
        """Drop what no running request uses."""
        self._free += self.tree.flush()

    def owned(self, req: Req) -> int:
        """Pages that no one but req holds."""
        return len(req.pages) - req.shared

    def used(self, running: Sequence[Req]) -> int:
        """Positions that hold keys and values of running requests."""
        own = sum(req.cached_len - req.shared * self.page_size for req in running)
        return own + self.tree.protected * self.page_size

    def ledger(self) -> dict[str, int]:
        """Pages by owner; free + cached + owned = total, always."""
        return {"free": len(self._free), "cached": self.tree.pages, "owned": self._owned, "total": self.num_pages}


def token_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


def pages_for(wanted: int, budget: int | None, page_bytes: int) -> int:
    """Pages that fit into budget bytes (None: as many as wanted); ValueError if not even one does."""
    fit = wanted if budget is None else min(wanted, budget // page_bytes)
    if fit < 1:
        raise ValueError(f"kv_memory {budget} bytes is less than one page takes: {page_bytes} bytes")
    return fit
