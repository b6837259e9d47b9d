"""Guesses of the tokens that come next, which the model then verifies in one forward: who guesses, and how many are
worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .core import Req, ReqState, ScheduledReq

NGRAMS = (4, 3, 2)  # tokens that must occur again, the longest first
FIRST_RATE = 0.7  # what a request is taken for before it has shown anything
STEP = 0.2  # how far one outcome moves the rate
PROBE_EVERY = 16  # steps after which a request whose guesses fail may try one
# Rows of a step that cost as much as reading the weights once; fewer are nearly free. Measured on a CPU with bfloat16;
# for GPUs between what the data sheets of A100 and H100 give, some 150 and 300 operations per byte; not measured.
FREE_ROWS = {"cpu": 20, "cuda": 200}


@dataclass(slots=True)
class Guess:
    """The tokens that may follow a request's own."""

    tokens: list[int]
    probs: list[torch.Tensor] = field(default_factory=list)  # float32[V], what each was drawn from; empty: certain


class Proposer(Protocol):
    """Who guesses."""

    cost: float  # share of a forward of the model that one more guess for all requests takes

    def propose(self, wanted: Sequence[tuple[Req, int]]) -> list[Guess]:
        """At most so many tokens for each of the requests, in their order; an empty guess is always allowed."""

    def release(self, req: Req) -> None:
        """req has left the running ones: give up what was kept for it. Idempotent."""

    def flush(self) -> None:
        """Drop what no request uses."""


@dataclass(slots=True)
class Speculation:
    """One request's record: how well its guesses fare. Preemption does not change it."""

    rate: float = FIRST_RATE  # chance that a guess is accepted if those before it are
    idle: int = 0  # steps since the last guess
    index: Any = None  # owned by the proposer

    def length(self, worth: float, most: int) -> int:
        """How many guesses to verify: the i-th is accepted with probability rate ** i, which must reach ``worth``."""
        count, chance = 0, self.rate
        while count < most and chance >= worth:
            count, chance = count + 1, chance * self.rate
        self.idle += 1
        return min(1, most) if count == 0 and self.idle > PROBE_EVERY else count

    def learn(self, drafted: int, accepted: int) -> None:
        """Of a draft the first ``accepted`` were right and the next one, if there was one, was not."""
        self.idle = 0
        for _ in range(accepted):
            self.rate += STEP * (1.0 - self.rate)
        if accepted < drafted:
            self.rate -= STEP * self.rate


class Speculator:
    """Divides what a step has left among the requests that decode, and learns from the outcome."""

    def __init__(self, proposer: Proposer, most: int, free_rows: int) -> None:
        """most: guesses of one request in one step; free_rows as in FREE_ROWS."""
        self.proposer, self.most, self.free_rows = proposer, most, free_rows

    def guess(self, items: Sequence[ScheduledReq], room: int) -> list[tuple[ScheduledReq, Guess]]:
        """Guesses for items in DECODE, ``room`` tokens in all at most, none beyond the request's max_tokens."""
        wanted: list[tuple[ScheduledReq, int]] = []
        worth = self.worth(items)
        decoding = [item for item in items if item.req.state is ReqState.DECODE]
        for place, item in enumerate(decoding):
            req = item.req
            req.speculation = req.speculation or Speculation()
            # The token after the draft comes for nothing, so that a draft of all that is allowed would be one too many.
            most = min(self.most, req.max_tokens - req.output_len - 1, room // (len(decoding) - place))
            if count := req.speculation.length(worth, most):
                wanted.append((item, count))
                room -= count
        if not wanted:
            return []
        guesses = self.proposer.propose([(item.req, count) for item, count in wanted])
        return [(item, guess) for (item, _), guess in zip(wanted, guesses, strict=True) if guess.tokens]

    def worth(self, items: Sequence[ScheduledReq]) -> float:
        """The chance that a guess needs. One more row makes a step longer by 1 / (free_rows + rows) of its time, so it
        pays if it adds at least that share of the tokens that the step gives anyway."""
        rows, tokens = sum(item.extend_len for item in items), sum(item.samples for item in items)
        return tokens / (self.free_rows + rows) + self.proposer.cost


@dataclass(slots=True)
class NgramIndex:
    """Where the n-grams of one request ended last; each token is looked at once."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n tokens -> the position after them
    done: int = 0  # positions up to this one are in

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in all n-grams that something follows: those at the very end are what will be looked up."""
        for end in range(self.done + 1, len(tokens)):
            for n in NGRAMS:
                if n <= end:
                    self.ends[tuple(tokens[end - n : end])] = end
        self.done = len(tokens) - 1

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position after the last earlier occurrence of the longest n-gram that ends the tokens."""
        found = (self.ends.get(tuple(tokens[-n:])) for n in NGRAMS)
        return next((end for end in found if end is not None), None)


class NgramProposer:
    """Prompt lookup: what followed the latest tokens when they last occurred, in prompt or output, may follow again."""

    cost = 0.0

    def propose(self, wanted: Sequence[tuple[Req, int]]) -> list[Guess]:
        return [Guess(self._continue(req, count)) for req, count in wanted]

    def release(self, req: Req) -> None:
        """The index describes token_ids, which a preempted request keeps, and goes with the request."""

    def flush(self) -> None: ...

    def _continue(self, req: Req, count: int) -> list[int]:
        index = req.speculation.index = req.speculation.index or NgramIndex()
        index.extend(req.token_ids)
        start = index.find(req.token_ids)
        if start is None:
            return []
        period = req.length - start  # a text that repeats itself goes on where the known tokens end
        return [req.token_ids[start + i % period] for i in range(count)]


def agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of a draft were accepted: those before the first that the model would not have given."""
    return next((i for i, guess in enumerate(draft) if guess != tokens[i]), len(draft))
