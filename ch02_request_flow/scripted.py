"""Stands where a model stands, without weights: a rule that answers every prompt with one readable sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from .core import Context, Limits, SamplingParams

ANSWER = "Every request takes this path: tokenizer, scheduler, engine, model runner, detokenizer."


class ScriptedLimits(Limits):
    """The door of an engine without probabilities: refuses what would change them, too."""

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, default_max_tokens: int | None) -> int:
        for f in fields(params):
            value = getattr(params, f.name)
            no_op = value == f.default or (f.name, value) == ("top_k", -1)
            if not no_op and f.name not in ("max_tokens", "stop", "ignore_eos"):
                raise ValueError(f"{f.name} is not supported: the scripted model has no probabilities and ends by EOS")
        return super().check(prompt_ids, params, default_max_tokens)


class ScriptedModel:
    """A pure function from token ids to logits, like a language model: the ids say how far the answer has come."""

    def __init__(self, answer_ids: Sequence[int], eos_id: int, vocab_size: int) -> None:
        self.answer_ids = list(answer_ids)
        self.eos_id = eos_id
        self.vocab_size = vocab_size

    def forward(self, ctx: Context) -> torch.Tensor:
        """Logits float32[R, vocab_size]: one-hot at the token that continues the answer, EOS after its end."""
        inp = ctx.inp
        ids, bounds = inp.ids.tolist(), inp.cu_extend.tolist()
        logits = torch.zeros(len(inp.logit_rows), self.vocab_size)
        for row, at in enumerate(inp.logit_rows.tolist()):
            start = max(bound for bound in bounds if bound <= at)
            logits[row, self.next_token(ids[start : at + 1])] = 1.0
        return logits

    def next_token(self, ids: Sequence[int]) -> int:
        """The longest part of the answer that the ids end with decides what follows."""
        for done in range(min(len(self.answer_ids), len(ids)), -1, -1):
            if list(ids[len(ids) - done :]) == self.answer_ids[:done]:
                return self.answer_ids[done] if done < len(self.answer_ids) else self.eos_id
        raise AssertionError("the empty part always matches")
