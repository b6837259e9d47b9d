"""A scheduler and its KV cache without a model: what is "computed" for a token is a hash of all tokens up to it.

So a step costs next to nothing, and a key that is lost, overwritten or never computed shows as a wrong number.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

VOCAB = 24
EOS = 0
MODULUS = 2**45  # hashes are exact in float64


def part(chapter: ModuleType, name: str) -> ModuleType:
    return importlib.import_module(f"{chapter.__name__}.{name}")


def has_option(chapter: ModuleType, name: str) -> bool:
    return name in part(chapter, "config").EngineConfig.__dataclass_fields__


def draft_of(item: Any) -> list[int]:
    return getattr(item, "draft", [])


def extended(hashes: list[int], tokens: Sequence[int]) -> list[int]:
    """hashes[i] covers tokens[: i + 1]; computes, in place, those that are missing."""
    for token in tokens[len(hashes) :]:
        hashes.append(((hashes[-1] if hashes else 7) * 1_000_003 + token + 1) % MODULUS)
    return hashes


def token_after(prefix_hash: int, salt: int) -> int:
    """The fake model's token; two requests with one salt and one history go on alike."""
    return (prefix_hash * 2_654_435_761 + salt * 40_503 >> 7) % VOCAB


@dataclass
class Job:
    """One request, and what must come of it if nobody aborts it."""

    rid: int
    prompt: list[int]
    max_tokens: int
    arrives: int = 0  # step
    aborts: list[int] = field(default_factory=list)  # steps; also before it arrives, after it ends, twice
    salt: int = 0
    ignore_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()

    def expected(self) -> tuple[list[int], str]:
        tokens, hashes = list(self.prompt), []
        while True:
            token = token_after(extended(hashes, tokens)[-1], self.salt)
            tokens.append(token)
            output = tokens[len(self.prompt) :]
            if token in self.stop_token_ids or (token == EOS and not self.ignore_eos):
                return output, "stop"
            if len(output) == self.max_tokens:
                return output, "length"


class Rig:
    """Drives a chapter's Scheduler and KVCache, and checks after every step what must hold after every step."""

    def __init__(
        self,
        chapter: ModuleType,
        *,
        max_running: int = 8,
        budget: int = 64,
        capacity: int = 1024,
        page_size: int = 4,
        static: bool = False,
        prefix_cache: bool = True,
        speculator: Any = None,
    ) -> None:
        """capacity: tokens that the pool holds; a chapter without pages has max_running slots of that length."""
        self.chapter, self.core = chapter, part(chapter, "core")
        self.paged = has_option(chapter, "page_size")
        pages, size = (capacity // page_size, page_size) if self.paged else (max_running, capacity)
        more = {"prefix_cache": prefix_cache} if has_option(chapter, "prefix_cache") else {}
        like = torch.empty(0, dtype=torch.float64)
        self.kv = part(chapter, "kvcache").KVCache(1, pages, size, 1, 1, like, **more)
        self.scheduler = part(chapter, "scheduler").Scheduler(
            self.kv, [EOS], max_running=max_running, max_batch_tokens=budget, static=static
        )
        if speculator:
            self.scheduler.speculator = speculator
        self.max_running, self.budget = max_running, budget
        self.now = 0
        self.jobs: dict[int, Job] = {}
        self.reqs: dict[int, Any] = {}  # live, in the order they came
        self.hashes: dict[int, list[int]] = {}
        self.output: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.cached: dict[int, int] = {}  # prompt tokens that a finished request did not have to compute
        self.steps: list[dict[int, int]] = []  # per step: extend_len by rid
        self.phases: list[str] = []

    # ---- driving

    def add(self, job: Job) -> Any:
        params = self.chapter.SamplingParams(ignore_eos=job.ignore_eos, stop_token_ids=job.stop_token_ids)
        req = self.core.Req(job.rid, list(job.prompt), len(job.prompt), params, job.max_tokens)
        self.jobs[job.rid], self.reqs[job.rid] = job, req
        self.hashes[job.rid], self.output[job.rid] = [], []
        self.scheduler.add(req)
        return req

    def submit(self, rid: int, prompt_len: int, max_tokens: int) -> Any:
        """A request whose prompt shares nothing with others."""
        return self.add(Job(rid, own_prompt(rid, prompt_len), max_tokens))

    def abort(self, rid: int) -> None:
        alive = rid in self.reqs
        out = self.scheduler.abort(rid)
        assert (out is not None) == alive, "an abort answers once, for a request that lives"
        if out is not None:
            self._take(out)
        self.check()

    def step(self) -> dict[int, int]:
        """One step; returns extend_len by rid, {} where there was nothing to do."""
        self.now += 1
        before = [(req, req.state) for req in self.scheduler.running]
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.reqs, "requests wait although nothing runs"
            self.check()
            return {}
        part_of = {item.req.rid: item for item in batch.items}
        self._check_batch(batch, before, part_of)
        self._compute(batch)
        tokens = [self._tokens(item) for item in batch.items]
        outs = self.scheduler.process(batch, tokens, [[] for _ in tokens])
        for out in outs:
            self._take(out)
        for req, state in before:
            if state is self.core.ReqState.DECODE and req.rid in part_of:
                assert [out.rid for out in outs].count(req.rid) == 1, "a running decode has its token in every step"
        self.check()
        self.steps.append({rid: part_of[rid].extend_len for rid in sorted(part_of)})
        return self.steps[-1]

    def run(self, most: int = 10_000) -> list[dict[int, int]]:
        """Until nothing is left, at most so many steps; returns the steps."""
        begun = len(self.steps)
        while self.reqs:
            assert len(self.steps) - begun < most, f"{len(self.reqs)} requests are not done after {most} steps"
            self.step()
        assert self.step() == {}
        return self.steps[begun:]

    def _take(self, out: Any) -> None:
        assert out.rid not in self.ends, "a message after the last one"
        self.output[out.rid] += out.ids
        if out.finish:
            self.ends[out.rid] = out.finish.reason
            self.cached[out.rid] = out.counters["cached_tokens"]
            del self.reqs[out.rid]
        else:
            assert out.ids, "a message that says nothing"

    # ---- the fake model

    def _tokens(self, item: Any) -> list[int]:
        """The token after those that are known, and the next ones as long as they have been guessed."""
        if not item.samples:
            return []
        req, salt = item.req, self.jobs[item.req.rid].salt
        hashes = extended(list(self.hashes[req.rid]), req.token_ids)
        tokens = [token_after(hashes[req.length - 1], salt)]
        for guess in draft_of(item):
            if guess != tokens[-1]:
                break
            extended(hashes, req.token_ids + tokens)
            tokens.append(token_after(hashes[-1], salt))
        return tokens

    def _compute(self, batch: Any) -> None:
        """Store this step's hashes; then everything that each request's attention would read must be there."""
        written, read, want = [], [], []
        table, size = self.kv.table([item.req for item in batch.items]), self.kv.page_size
        for item, pages in zip(batch.items, table, strict=True):
            req, end = item.req, item.req.cached_len + item.extend_len
            hashes = extended(self.hashes[req.rid], req.token_ids)
            if draft_of(item):
                hashes = extended(list(hashes), req.token_ids + draft_of(item))
            written += hashes[req.cached_len : end]
            want += hashes[:end]
            read += [pages[at // size] * size + at % size for at in range(end)]
        slots = self.kv.slots(batch)
        assert len(set(slots)) == len(slots) == batch.tokens, "two tokens of a step have one place"
        values = torch.tensor(written, dtype=torch.float64).view(-1, 1, 1)
        self.kv.store(0, values, values, torch.tensor(slots))
        found = self.kv.k[0].flatten()[torch.tensor(read)]
        assert torch.equal(found, torch.tensor(want, dtype=torch.float64)), "a request reads keys that are not its own"

    # ---- what must hold

    def _check_batch(self, batch: Any, before: list[tuple[Any, Any]], part_of: dict[int, Any]) -> None:
        states = self.core.ReqState
        assert len(part_of) == len(batch.items), "a request is in the batch twice"
        assert 0 < batch.tokens <= self.budget
        assert all(item.extend_len >= 1 for item in batch.items)
        in_batch = sorted(item.req.rid for item in batch.items)
        assert in_batch == sorted(req.rid for req in self.scheduler.running), "everything that runs advances"
        assert len(batch.items) <= min(self.max_running, self.budget)
        oldest = next(iter(self.reqs.values()))
        assert oldest.rid in part_of, "the oldest request runs in every step: nothing starves"
        for req, state in before:
            if req.state is states.WAITING:
                assert req.rid not in part_of and req.cached_len == 0 and not req.pages  # preempted
            elif state is states.DECODE:
                item = part_of[req.rid]
                assert item.extend_len == 1 + len(draft_of(item)) and item.samples
                room = self.jobs[req.rid].max_tokens - req.output_len
                assert item.extend_len <= room, "a guess after the last token is never needed"
            else:
                assert not draft_of(part_of[req.rid]), "nothing is guessed before the prompt is computed"
        if self.chapter.__name__ >= "ch07":
            several = [item.extend_len > 1 for item in batch.items]
            assert several == sorted(several), "the requests with one row come first"
        self.phases.append(batch.phase)

    def check(self) -> None:
        """The books, counted anew from the objects themselves."""
        scheduler, states = self.scheduler, self.core.ReqState
        scheduler.check()
        queued = [*scheduler.running, *scheduler.waiting]
        assert queued == list(self.reqs.values()), "each live request in one queue, in the order they came"
        assert all(req.state in (states.PREFILL, states.DECODE) for req in scheduler.running)
        for req in queued:
            job = self.jobs[req.rid]
            assert 0 <= req.cached_len < req.length < req.prompt_len + job.max_tokens
            assert req.prompt_len <= req.sent_len == req.length
            assert req.token_ids == job.prompt + self.output[req.rid]
            assert len(req.pages) * self.kv.page_size >= req.cached_len
            if req.state is states.WAITING:
                assert req.cached_len == 0 and not req.pages
            elif req.state is states.DECODE:
                assert req.cached_len == req.length - 1
        self._check_pages(queued)

    def _check_pages(self, live: list[Any]) -> None:
        owned = [page for req in live for page in req.pages[getattr(req, "shared", 0) :]]
        tree = getattr(self.kv, "tree", None)
        cached = [page for node in tree.nodes() for page in node.pages] if tree else []
        free = list(self.kv._free)
        assert sorted(owned + cached + free) == list(range(self.kv.num_pages)), "each page is in one place"
        counts = {"free": len(free), "cached": len(cached), "owned": len(owned), "total": self.kv.num_pages}
        assert self.kv.ledger() == counts
        if tree:
            tree.check()
            for req in live:
                shared = req.pages[: req.shared]
                assert set(shared) <= set(cached), "a request reads a page that the tree gave up"

    def check_idle(self) -> None:
        """Nothing lives: everything has been answered rightly and all memory is back."""
        assert not self.reqs and not self.scheduler.running and not self.scheduler.waiting
        assert self.ends.keys() == self.jobs.keys()
        for rid, job in self.jobs.items():
            tokens, reason = job.expected()
            if self.ends[rid] == "abort":
                assert job.aborts and self.output[rid] == tokens[: len(self.output[rid])] != tokens
            else:
                assert (self.output[rid], self.ends[rid]) == (tokens, reason)
        books = self.kv.ledger()
        assert books["owned"] == 0 and books["free"] + books["cached"] == books["total"]
        if hasattr(self.kv, "flush"):
            self.kv.flush()
            assert self.kv.ledger()["free"] == books["total"]


def own_prompt(rid: int, length: int) -> list[int]:
    """A prompt that differs from every other request's in its first token, and so shares nothing with it."""
    rng = random.Random(rid)
    return [VOCAB + rid, *(rng.randrange(VOCAB) for _ in range(length - 1))]
