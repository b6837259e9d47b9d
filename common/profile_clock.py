"""A clock around the parts of an engine, attached from outside: the chapters know nothing of it and stay as they are.

Every call that is timed belongs to one part; what a call spends in other timed calls counts for those. So the parts of a
step add up to the step.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LINEARS, ATTENTION, MODEL, INPUTS = "linears", "attention", "rest of the model", "input tensors"
SCHEDULER, SAMPLER, PROPOSER = "scheduler", "sampler", "proposer"
DETOKENIZER, REST = "detokenizer", "engine loop, rest"
PARTS = (LINEARS, ATTENTION, MODEL, INPUTS, SAMPLER, PROPOSER, SCHEDULER, DETOKENIZER, REST)


@dataclass
class Step:
    """One step of an engine: seconds in all and by part, and what it had to do.

    `rows` tokens were forwarded for `requests` requests, `logit_rows` of them gave logits; `context` is the sum of the
    requests' lengths after the step, `pairs` that of query-key pairs. `decode`: every request only continued its answer.
    """

    total_s: float
    parts: dict[str, float]
    decode: bool = True
    requests: int = 0
    rows: int = 0
    logit_rows: int = 0
    context: int = 0
    pairs: int = 0


@dataclass
class Clock:
    """Exclusive times of nested calls. `wait` is called at both ends of a part: on a GPU it waits for the device."""

    wait: Callable[[], None] | None = None
    steps: list[Step] = field(default_factory=list)
    _parts: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=lambda: [0.0])  # seconds of timed calls inside each open one
    _batch: Any = None
    _looking: float = 0.0

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with its time counted for `part`."""

        def around(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            self._inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                spent = self._now() - started
                self._parts[part] = self._parts.get(part, 0.0) + spent - self._inner.pop()
                self._inner[-1] += spent

        return around

    def seen(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A scheduler's `schedule` whose batch is looked at, before the step changes it."""

        def around() -> Any:
            batch = call()
            started = time.perf_counter()
            self._batch = _work(batch) if batch else None
            self._looking = time.perf_counter() - started
            self._inner[-1] += self._looking  # counts for no part
            return batch

        return around

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """An LLM's `step`, of which a record is kept if it forwarded anything."""
        inside = self.timed(REST, call)

        def around() -> Any:
            self._parts.clear()
            self._batch, self._looking = None, 0.0
            started = self._now()
            out = inside()
            total = self._now() - started - self._looking
            if self._batch is not None:
                self.steps.append(Step(total, dict(self._parts), **self._batch))
            return out

        return around

    def _now(self) -> float:
        if self.wait:
            self.wait()
        return time.perf_counter()


def _work(batch: Any) -> dict[str, Any]:
    ends = [(item.req.cached_len + item.extend_len, item.extend_len) for item in batch.items]
    return {
        "decode": all(item.req.state.name == "DECODE" for item in batch.items),
        "requests": len(batch.items),
        "rows": batch.tokens,
        "logit_rows": sum(getattr(item, "rows", int(item.samples)) for item in batch.items),  # a draft has several
        "context": sum(end for end, _ in ends),
        "pairs": sum(extend * end - extend * (extend - 1) // 2 for end, extend in ends),
    }


@contextmanager
def attached(llm: Any, package: str, clock: Clock) -> Iterator[None]:
    """Inside the block the clock runs around the parts of this LLM; afterwards the LLM is what it was.

    Parts that a chapter does not have, or does not call one by one, get no time.
    """
    engine = llm.engine
    runner = engine.runner
    undo: list[Any] = []

    def put(owner: Any, name: str, made: Callable[..., Any]) -> None:
        own = vars(owner).get(name, undo)  # the list itself: a value that no attribute has
        setattr(owner, name, made)
        undo.append((owner, name, own))

    def wrap(owner: Any, part: str, *names: str) -> None:
        for name in names:
            if callable(call := getattr(owner, name, None)):
                put(owner, name, clock.timed(part, call))

    for linear in _linears(runner.model):
        wrap(linear, LINEARS, "_linear")
    wrap(runner.backend, ATTENTION, "plan", "attend")
    wrap(runner, MODEL, "forward")
    wrap(runner, INPUTS, "prepare")
    wrap(engine.sampler, SAMPLER, *_public(engine.sampler))
    if proposer := getattr(getattr(engine.scheduler, "speculator", None), "proposer", None):
        wrap(proposer, PROPOSER, "propose")
    wrap(engine.scheduler, SCHEDULER, "schedule", "process")
    put(engine.scheduler, "schedule", clock.seen(engine.scheduler.schedule))
    wrap(importlib.import_module(f"{package}.tokenizer").Detokenizer, DETOKENIZER, "push", "flush")
    put(llm, "step", clock.step(llm.step))
    try:
        yield
    finally:
        for owner, name, own in reversed(undo):
            if own is undo:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _public(thing: Any) -> list[str]:
    return [name for name, value in vars(type(thing)).items() if callable(value) and not name.startswith("_")]


def _linears(model: Any) -> list[Any]:
    """The layers of a Decoder that multiply by a matrix: those that hold a packed or plain `_linear`."""
    layers = [value for layer in model.layers for value in vars(layer).values()]
    return [layer for layer in [*layers, *vars(model).values()] if callable(getattr(layer, "_linear", None))]
