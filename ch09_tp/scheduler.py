"""Decides which requests run in the next step and what the tokens they gain mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from common.trace import Tracer

from .core import Batch, Req, ReqState, ScheduledReq
from .kvcache import KVCache
from .message import Finish, TokensOut


class Scheduler:
    """First come, first served; a step takes every decoding request and fills up with prefill chunks.

    Owns every live request: each is in exactly one of ``waiting`` and ``running`` (in the order they came). Aborts are
    called between steps, so they never meet a batch in flight. ``running`` never outgrows the token budget, so every
    running request advances in every step: nothing starves.
    """

    def __init__(
        self,
        kv: KVCache,
        eos_ids: Sequence[int],
        max_running: int,
        max_batch_tokens: int,
        static: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """max_batch_tokens: tokens of one step at most. static: a batch, once full, runs to its end before the next."""
        self.max_running = min(max_running, max_batch_tokens)
        self.max_batch_tokens = max_batch_tokens
        self.static = static
        self._room = 0  # requests that may still join: a static batch keeps it from step to step until it is complete
        self.preemptions = 0
        self.hit_tokens = 0  # the cached_tokens of all requests
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []
        self.kv = kv
        self.eos_ids = frozenset(eos_ids)
        self.tracer = tracer

    def add(self, req: Req) -> None:
        self.waiting.append(req)
        if self.tracer:
            self.tracer.emit("Scheduler", "add", req.rid, state=req.state.name, length=req.length)

    def abort(self, rid: int) -> TokensOut | None:
        """End a request wherever it is; None if it is unknown or over."""
        for queue in (self.waiting, self.running):
            for req in queue:
                if req.rid == rid:
                    queue.remove(req)
                    return self._end(req, ReqState.ABORTED, Finish("abort"))
        return None

    def schedule(self) -> Batch | None:
        """The next step, or None if there is nothing to do."""
        budget = self.max_batch_tokens - len(self.running)  # one token of every running request is set aside
        items = []
        preempted = self.preemptions
        for req in list(self.running):  # the oldest first, so that those preempted have no part in the step yet
            extend_len = min(req.length - req.cached_len, 1 + budget)
            if self._make_room(req, extend_len):
                budget -= extend_len - 1
                items.append(self._take(req, extend_len))
        if not (self.static and self.running):
            self._room = self.max_running - len(self.running)
        while self.waiting and self._room and budget > 0 and self.preemptions == preempted:
            req = self.waiting[0]
            if self._prefix_is_coming(req):
                break
            self.kv.attach(req)
            extend_len = min(req.length - req.cached_len, budget)
            if not self.kv.can_allocate(req, req.length - req.cached_len):  # all of it, not this chunk alone
                self.kv.free(req)
                self._room = 0  # a static batch is complete with those that fit
                break
            self.waiting.popleft()
            if not req.scheduled_at:  # a preempted request finds its own tokens, which is no hit of its prompt
                req.cached_tokens = req.cached_len
                self.hit_tokens += req.cached_len
            req.to(ReqState.PREFILL)
            self.running.append(req)
            self._room -= 1
            if self.tracer and self.kv.prefix_cache:
                self._trace("match", req, component="PrefixCache")
            budget -= extend_len
            items.append(self._take(req, extend_len))
        if not self.waiting:
            self._room = 0  # a static batch is complete once nobody waits
        items.sort(key=lambda item: item.extend_len > 1)  # decode rows first: a kernel of their own computes them
        return Batch(items) if items else None

    def _prefix_is_coming(self, req: Req) -> bool:
        """Whether a running prefill is about to compute more of req's prefix than is cached: then req waits for it.

        The wait is bounded: that prefill advances in every step and shares each chunk as soon as it is computed.
        """
        end = self.kv.match(req) + self.kv.page_size
        return (
            self.kv.prefix_cache
            and end < req.length
            and any(
                other.state is ReqState.PREFILL and end <= other.length and other.token_ids[:end] == req.token_ids[:end]
                for other in self.running
            )
        )

    def _make_room(self, req: Req, n: int) -> bool:
        """Preempt the youngest until n more tokens of req have a place; False if req itself had to go.

        The oldest never has to: the door lets nothing in that the whole pool could not hold.
        """
        while req.state is not ReqState.WAITING and not self.kv.can_allocate(req, n):
            self._preempt(self.running.pop())
        return req.state is not ReqState.WAITING

    def _preempt(self, req: Req) -> None:
        """Back to the head of the queue without its pages; its tokens stay and will be computed again."""
        req.to(ReqState.WAITING)
        self.kv.free(req)
        self.waiting.appendleft(req)
        self.preemptions += 1
        if self.tracer:
            self._trace("preempt", req)

    def _take(self, req: Req, extend_len: int) -> ScheduledReq:
        """Give req its part of the step."""
        self.kv.allocate(req, extend_len)
        if self.tracer:
            self._trace("schedule", req, extend_len=extend_len)
            self._trace("allocate", req, component="KVCache")
        return ScheduledReq(req, extend_len)

    def process(
        self, batch: Batch, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[dict[str, Any]]]
    ) -> list[TokensOut]:
        """Append each request's tokens, one list per item of the batch, and end the requests that are complete.

        logprobs has one entry per token for the requests that want them, else an empty list.
        """
        outs = []
        for item, new, details in zip(batch.items, tokens, logprobs, strict=True):
            req = item.req
            req.cached_len += item.extend_len  # computed and stored by the step that gave these tokens
            if req.state is ReqState.PREFILL:
                self.kv.commit(req)
            finish = None
            for token in new:
                req.token_ids.append(token)
                finish = self._finish(req, token)
                if self.tracer:
                    self._trace("process", req, token=token)
                if finish:
                    break
            if finish:
                self.running.remove(req)
                out = self._end(req, ReqState.FINISHED, finish)
            elif new:
                if req.state is ReqState.PREFILL:
                    req.to(ReqState.DECODE)
                out = self._send(req)
            else:
                continue
            out.logprobs = list(details[: len(out.ids)]) or None
            outs.append(out)
        return outs

    def check(self) -> None:
        """Assert the invariants over the queues; called after a step when debugging."""
        live = [*self.waiting, *self.running]
        assert len({req.rid for req in live}) == len(live), "a request is in two queues"
        assert all(req.state is ReqState.WAITING for req in self.waiting)
        assert len(self.running) <= self.max_running
        assert all(req.state in (ReqState.PREFILL, ReqState.DECODE) for req in self.running)
        for req in live:
            assert 0 <= req.cached_len < req.length and req.prompt_len <= req.sent_len <= req.length
        pages = self.kv.ledger()
        assert pages["free"] + pages["cached"] + pages["owned"] == pages["total"], "a KV page is lost or owned twice"
        assert pages["owned"] == sum(map(self.kv.owned, live)), "a request that is over still owns pages"

    def _finish(self, req: Req, token: int) -> Finish | None:
        cut = req.stop.feed([token]) if req.stop else None
        if cut is not None:
            return Finish("stop", cut)
        if token in req.params.stop_token_ids or (token in self.eos_ids and not req.params.ignore_eos):
            return Finish("stop")
        return Finish("length") if req.output_len >= req.max_tokens else None

    def _send(self, req: Req) -> TokensOut:
        ids = req.token_ids[req.sent_len :]
        req.sent_len = req.length
        return TokensOut(req.rid, ids)

    def _end(self, req: Req, state: ReqState, finish: Finish) -> TokensOut:
        req.to(state)
        self.kv.finish(req)
        out = self._send(req)
        out.finish = finish
        out.counters = {"cached_tokens": req.cached_tokens, "scheduled_at": req.scheduled_at}
        if self.tracer:
            self._trace("finish", req, note=finish.reason)
        return out

    def _trace(
        self,
        action: str,
        req: Req,
        extend_len: int = 0,
        token: int | None = None,
        note: str = "",
        component: str = "Scheduler",
    ) -> None:
        assert self.tracer is not None
        self.tracer.emit(
            component,
            action,
            req.rid,
            state=req.state.name,
            length=req.length,
            cached_len=req.cached_len,
            extend_len=extend_len,
            pages=len(req.pages),
            token=token,
            note=note,
        )
