"""Stands where a model stands, without weights: a rule that answers every prompt with one readable sentence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .core import Context

ANSWER = "Every request takes this path: tokenizer, scheduler, engine, model runner, detokenizer."


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
