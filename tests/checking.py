"""A KV pool that knows what lies in it: every attention read is checked before it is made.

Beside the keys and values of each position of each layer it keeps a mark: the hash of all tokens up to the one whose key
and value were written there. A request may only read positions that hold the marks of its own tokens, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.scheduling import extended

NOTHING = -1


@dataclass
class Checked:
    """One step: what it writes where, and what it is about to read where."""

    inner: Any  # the plan of the backend behind
    slots: torch.Tensor  # int64[T]
    written: torch.Tensor  # int64[T], their marks
    read: torch.Tensor  # int64[N], all positions of all requests, one request after the other
    due: torch.Tensor  # int64[N], the marks that must be there


class CheckingPool:
    """Stands between an engine's model and its attention backend. ``reads`` counts the positions it has checked."""

    def __init__(self, engine: Any) -> None:
        self.kv, self.scheduler, self.inner = engine.kv, engine.scheduler, engine.runner.backend
        layers, pages, size = self.kv.k.shape[:3]
        self.marks = torch.full((layers, pages * size), NOTHING)
        self.reads = 0
        self._batch: Any = None
        self._hashes: dict[int, list[int]] = {}  # by request: of its tokens, those not yet certain included
        prepare = engine.runner.prepare

        def prepared(batch: Any) -> Any:
            self._batch = batch
            return prepare(batch)

        engine.runner.prepare, engine.runner.backend = prepared, self

    def plan(self, inp: Any) -> Checked:
        reqs = [item.req for item in self._batch.items]
        table, bounds = inp.table.tolist(), inp.cu_extend.tolist()
        lengths, size = inp.seq_lens.tolist(), self.kv.page_size
        slots, written, read, due = inp.slots.tolist(), [], [], []
        for req, pages, start, end, length in zip(reqs, table, bounds, bounds[1:], lengths, strict=False):
            before = length - (end - start)
            marks = self._marks(req, before, inp.ids[start:end].tolist())
            places = [pages[at // size] * size + at % size for at in range(length)]
            assert slots[start:end] == places[before:], f"request {req.rid} writes where it will not read"
            written += marks[before:]
            read += places
            due += marks
        assert len(set(slots)) == len(slots), "two tokens of a step are written to one place"
        self._check_pages(reqs, slots)
        return Checked(self.inner.plan(inp), inp.slots, *(torch.tensor(x) for x in (written, read, due)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: Checked) -> torch.Tensor:
        marks = self.marks[layer]
        marks[plan.slots] = plan.written
        wrong = (marks[plan.read] != plan.due).nonzero()
        assert not len(wrong), f"{len(wrong)} positions that layer {layer} reads are not those of the request's tokens"
        self.reads += len(plan.read)
        return self.inner.attend(q, k, v, layer, plan.inner)

    def _marks(self, req: Any, before: int, ids: Sequence[int]) -> list[int]:
        """The hashes of the request's first tokens, ``before`` of them known, and of the ids that this step computes."""
        known = self._hashes.setdefault(req.rid, [])
        assert ids[: req.length - before] == req.token_ids[before : before + len(ids)], (
            "other tokens than the request's"
        )
        del known[req.length :]  # guesses of an earlier step, which were not accepted
        extended(known, req.token_ids)
        return extended(known[:before], [*req.token_ids[:before], *ids])

    def _check_pages(self, reqs: Sequence[Any], slots: Sequence[int]) -> None:
        """Nobody reads a free page, and what is written belongs to one request alone."""
        kv = self.kv
        free = set(kv._free)
        for req in reqs:
            assert not free & set(req.pages), f"request {req.rid} holds a page that is free"
        written = {slot // kv.page_size for slot in slots}
        assert not written & {page for node in kv.tree.nodes() for page in node.pages}, "a page of the tree is written"
        holders = [page for req in self.scheduler.running for page in set(req.pages) & written]
        assert len(holders) == len(set(holders)), "a page that two requests hold is written"
