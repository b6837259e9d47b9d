"""Proposers for tests: one that knows the future and is wrong as often as the test wants."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tests.conftest import CHAPTERS, ROOT

SPECULATIVE = [name for name in CHAPTERS if (ROOT / name / "speculative.py").exists()]
NEVER_DEAR = 10**30  # free rows with which every guess is worth its time


class Prophet:
    """future(req) -> all tokens of its output. Of its guesses a share ``wrong`` is wrong, at random places; a share of
    its drafts is short or empty."""

    cost = 0.0

    def __init__(self, future: Callable[[Any], Sequence[int]], seed: int, wrong: float = 0.3, vocab: int = 24) -> None:
        self.future, self.rng, self.wrong, self.vocab = future, random.Random(seed), wrong, vocab
        self.guess: Any = None  # the chapter's Guess
        self.released: list[int] = []

    def propose(self, wanted: Sequence[tuple[Any, int]]) -> list[Any]:
        return [self.guess(self._draft(req, count)) for req, count in wanted]

    def _draft(self, req: Any, count: int) -> list[int]:
        right = list(self.future(req)[req.output_len :][:count])
        draft = right + [self.rng.randrange(self.vocab) for _ in range(count - len(right))]
        draft = [(t + 1) % self.vocab if self.rng.random() < self.wrong else t for t in draft]
        return draft[: self.rng.choice((count, count, self.rng.randint(0, count)))]

    def release(self, req: Any) -> None:
        self.released.append(req.rid)

    def flush(self) -> None: ...


def speculator_of(chapter: ModuleType, proposer: Any, most: int = 8, free_rows: int = NEVER_DEAR) -> Any:
    """A chapter's Speculator over a proposer."""
    module = importlib.import_module(f"{chapter.__name__}.speculative")
    proposer.guess = module.Guess
    return module.Speculator(proposer, most, free_rows)


def guess_with(chapter: ModuleType, llm: Any, proposer: Any, most: int = 8) -> None:
    """Have a running engine guess with this proposer, always as much as it may."""
    llm.engine.scheduler.speculator = speculator_of(chapter, proposer, most)
