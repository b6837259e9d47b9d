"""A smaller model guesses, token by token, for all requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.checkpoints import Checkpoint

from .core import Batch, Req, ScheduledReq
from .model import ModelConfig
from .model_runner import ModelRunner
from .sampler import Sampler, SampleRow
from .speculative import Guess


def check_draft(draft: Checkpoint, target: Checkpoint) -> None:
    """Raises ValueError if draft cannot guess for target."""
    ModelConfig.from_dict(draft.config)
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model {draft.name} has a vocabulary of {draft.vocab_size} tokens, "
            f"{target.name} one of {target.vocab_size}: they must be the same"
        )


class DraftProposer:
    """Guesses with a model of its own, whose KV cache holds a shadow of each request.

    Ownership: a shadow owns pages of the draft model's cache as a Req does of the target's. It is made at the first
    guess and given up by release(). Its token_ids are the request's, then the guesses; its prompt_len says how many it
    took from the request. What it lacks it catches up on before it guesses; where the memory or the budget does not
    suffice there is no guess.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, max_len: int, budget: int, cost: float) -> None:
        """max_len: tokens that the model can take; budget: tokens that one call may catch up on."""
        self.runner, self.kv, self.sampler = runner, runner.kv, sampler
        self.max_len, self.budget, self.cost = max_len, budget, cost
        self.shadows: dict[int, Req] = {}

    def propose(self, wanted: Sequence[tuple[Req, int]]) -> list[Guess]:
        guesses = {req.rid: Guess([]) for req, _ in wanted}
        counts = {req.rid: min(count, self.max_len - req.length) for req, count in wanted}
        reqs = {req.rid: req for req, _ in wanted if counts[req.rid] > 0}
        items = self._catch_up([self._follow(req) for req in reqs.values()])
        while items:
            logits = self.runner.run(Batch(items))
            ready = [item.req for item in items if item.samples]
            for item in items:
                item.req.cached_len += item.extend_len
            rows = [self._row(reqs[shadow.rid], guesses[shadow.rid], logits) for shadow in ready]
            for shadow, token, probs in zip(ready, *self.sampler.guess(logits, rows), strict=True):
                guesses[shadow.rid].tokens.append(token)
                guesses[shadow.rid].probs += [] if probs is None else [probs]
                shadow.token_ids.append(token)
            more = [shadow for shadow in ready if len(guesses[shadow.rid].tokens) < counts[shadow.rid]]
            items = [item for item in map(self._extend, more) if item]
        return [guesses[req.rid] for req, _ in wanted]

    def release(self, req: Req) -> None:
        shadow = self.shadows.pop(req.rid, None)
        if shadow:
            self.kv.truncate(shadow, shadow.prompt_len)  # guesses are not what the tree should keep
            self.kv.free(shadow)

    def flush(self) -> None:
        self.kv.flush()

    def _follow(self, req: Req) -> Req:
        """The request's shadow with the request's tokens; guesses that became output stay computed."""
        shadow = self.shadows.get(req.rid)
        if shadow is None:
            shadow = self.shadows[req.rid] = Req(req.rid, list(req.token_ids), req.length, req.params, req.max_tokens)
            self.kv.attach(shadow)
            return shadow
        right, end = shadow.prompt_len, min(shadow.cached_len, req.length - 1)  # the last one is computed anew
        while right < end and shadow.token_ids[right] == req.token_ids[right]:
            right += 1
        self.kv.truncate(shadow, right)
        shadow.token_ids[shadow.prompt_len :] = req.token_ids[shadow.prompt_len :]
        shadow.prompt_len = req.length
        return shadow

    def _catch_up(self, shadows: Sequence[Req]) -> list[ScheduledReq]:
        """The first forward of a call: what each shadow lacks, as far as the budget goes."""
        left, items = self.budget, []
        for shadow in sorted(shadows, key=lambda shadow: shadow.length - shadow.cached_len):  # who lacks little first
            item = self._extend(shadow, min(shadow.length - shadow.cached_len, left))
            if item:
                left -= item.extend_len
                items.append(item)
        return sorted(items, key=lambda item: item.extend_len > 1)

    def _extend(self, shadow: Req, count: int = 1) -> ScheduledReq | None:
        """Room for so many tokens; None if there is none."""
        if count < 1 or not self.kv.can_allocate(shadow, count):
            return None
        self.kv.allocate(shadow, count)
        return ScheduledReq(shadow, count)

    def _row(self, req: Req, guess: Guess, logits: torch.Tensor) -> SampleRow:
        return self.sampler.row(req, guess.tokens, logits.shape[1], logits.device)
