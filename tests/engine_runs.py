"""Prompts and small helpers for tests that run a chapter's LLM."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from common.tiny import cached_tiny_model

PROMPT = [17, 230, 9, 511, 64, 700, 33]
OTHER = [5, 81, 640]


def params_of(chapter: ModuleType) -> Callable[..., Any]:
    """make(...): SamplingParams for 12 tokens that ignore EOS, unless told otherwise."""
    return lambda **values: chapter.SamplingParams(**{"ignore_eos": True, "max_tokens": 12, **values})


def engines_of(chapter: ModuleType) -> Iterator[Callable[..., Any]]:
    """Yields make(folder=, **options): an LLM on a tiny Llama in float32 that checks its books; then closes them all."""
    opened: list[Any] = []

    def make(folder: Path | None = None, **options: Any) -> Any:
        options = {"dtype": "float32", "threads": 1, "debug_invariants": True, **options}
        opened.append(chapter.LLM(str(folder or cached_tiny_model("llama")), **options))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def alone(chapter: ModuleType) -> dict[str, Any]:
    """What layers take besides their sizes: nothing, or, where a chapter spreads a model over ranks, a group of one."""
    if not (Path(chapter.__file__ or "").parent / "distributed.py").exists():
        return {}
    distributed = importlib.import_module(f"{chapter.__name__}.distributed")
    return {"group": distributed.Group(distributed.Place(), torch.device("cpu"))}


def run(llm: Any, prompts: Any, params: Any) -> list[Any]:
    return llm.generate(prompts, params, progress=False)


def drain(llm: Any) -> list[Any]:
    """Steps until nothing is left; all outputs in the order they came."""
    outputs: list[Any] = []
    for _ in range(10_000):
        if not llm.has_work():
            return outputs
        outputs += llm.step()
    raise AssertionError("the engine never comes to an end")


def first_new(ids: list[int], start: int = 2) -> int:
    """The first index from start on whose token did not occur before."""
    return next(at for at in range(start, len(ids)) if ids[at] not in ids[:at])
