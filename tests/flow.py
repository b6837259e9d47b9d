"""Short ways to open an engine of the tiny model and to run it dry."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import ch02_request_flow as ch02
from ch02_request_flow.scripted import ANSWER

MODEL = "dummy:llama-tiny"  # 512 positions, 1003 tokens
EOS = 2  # <|im_end|> of the tiny tokenizer; 0, <|endoftext|>, is one too
Params = ch02.SamplingParams
BRIEF = Params(max_tokens=3)


def open_llm(chapter: ModuleType = ch02, **options: Any) -> Any:
    fixed = {"model": MODEL, "dtype": "float32", "device": "cpu", "threads": 1, "debug_invariants": True}
    return chapter.LLM(**fixed | options)


def params_of(llm: Any, **fields: Any) -> Any:
    """SamplingParams of the chapter that this LLM is from."""
    return importlib.import_module(type(llm).__module__.partition(".")[0]).SamplingParams(**fields)


def answer(llm: Any) -> list[int]:
    """The ids of the one answer that the skeleton of ch02 has."""
    return [*llm.tokenizer.encode(ANSWER, special_tokens=False), EOS]


def drain(llm: Any, steps: int = 2000) -> list[Any]:
    """Step until there is no work; fails where there always is."""
    outputs = []
    while llm.has_work():
        outputs += llm.step()
        steps -= 1
        assert steps, "the engine has work for ever"
    return outputs
