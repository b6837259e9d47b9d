"""Logits to token ids: penalties, temperature, top_k, top_p, min_p, then one draw per row.

The randomness of a draw is a function of (seed, position) and of what it is for, so a request's samples depend neither on
the requests it shares a batch with nor on how often it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .core import Batch, Req, SamplingParams
from .ops import argmax

LOWEST = -9999.0  # logprob of what cannot be, in place of -inf or NaN, which JSON does not have
MASK = 2**64 - 1
DRAFT, ACCEPT = 1, 2  # streams of randomness besides that of the tokens, 0


@dataclass(slots=True)
class TokenCounts:
    """How often tokens occurred in one request; only requests with penalties have one."""

    output: torch.Tensor  # float32[V], occurrences in the output
    seen: torch.Tensor  # bool[V], occurs in prompt or output
    counted: int  # token_ids[:counted] are in

    @staticmethod
    def of(req: Req, vocab: int, device: torch.device) -> TokenCounts:
        """The request's counts, brought up to date: each token is looked at once in its life."""
        counts = req.sampler_state
        if counts is None:
            counts = TokenCounts(
                torch.zeros(vocab, device=device), torch.zeros(vocab, dtype=torch.bool, device=device), 0
            )
            req.sampler_state = counts
        fresh = torch.tensor(req.token_ids[counts.counted :], dtype=torch.int64, device=device)
        counts.seen[fresh] = True
        output = fresh[max(0, req.prompt_len - counts.counted) :]
        counts.output.index_add_(0, output, torch.ones(len(output), device=device))
        counts.counted = req.length
        return counts

    def after(self, draft: Sequence[int]) -> TokenCounts:
        """These counts as if the tokens of a draft had been output; self stays as it is."""
        if not draft:
            return self
        output, seen = self.output.clone(), self.seen.clone()
        for token in draft:
            output[token] += 1
            seen[token] = True
        return TokenCounts(output, seen, self.counted + len(draft))


@dataclass(slots=True)
class SampleRow:
    """What one row of logits needs to become a token."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be drawn, in its request
    counts: TokenCounts | None = None
    draft: int | None = None  # a guess for this token
    draft_probs: torch.Tensor | None = None  # float32[V], what the guess was drawn from; None: it was certain


class Sampler:
    """Vectorised over rows; rows with temperature 0 are exact argmax in any company."""

    def __init__(self, seed: int, argmax: Callable[[torch.Tensor], torch.Tensor] = argmax) -> None:
        self.seed = seed  # of requests that bring none
        self.argmax = argmax

    def rows(self, batch: Batch, vocab: int, device: torch.device) -> list[SampleRow]:
        """As many per item of the batch as it has logit rows, in their order."""
        rows = []
        for item in batch.items:
            for at in range(item.rows):
                row = self.row(item.req, item.draft[:at], vocab, device)
                if at < len(item.draft):
                    row.draft = item.draft[at]
                    row.draft_probs = item.draft_probs[at] if item.draft_probs else None
                rows.append(row)
        return rows

    def row(self, req: Req, draft: Sequence[int], vocab: int, device: torch.device) -> SampleRow:
        """For the token after those of req and of a draft that is taken for its output."""
        counts = TokenCounts.of(req, vocab, device).after(draft) if has_penalties(req.params) else None
        seed = mix(self.seed, req.rid) if req.params.seed is None else req.params.seed
        return SampleRow(req.params, seed, req.length + len(draft), counts)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[dict[str, Any] | None]]:
        """logits[R, V] -> R token ids, and per row {token_id, logprob, top} if it asked for logprobs.

        A row's guess is accepted where its token is the guess. Log-probabilities are those of the raw logits.
        """
        scores = penalise(logits, rows)
        ids = self.argmax(scores)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if drawn:
            picked = [rows[i] for i in drawn]
            u = torch.tensor([uniform(row.seed, row.position) for row in picked], dtype=torch.float64)
            p = verified(filtered(scores[drawn], picked), picked)
            ids[drawn] = pick(p, u.to(logits.device))
        chosen = ids.tolist()
        return chosen, [
            logprobs(logits[i], token, row.params.logprobs)
            for i, (token, row) in enumerate(zip(chosen, rows, strict=True))
        ]

    def guess(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[torch.Tensor | None]]:
        """Another model's logits[R, V] -> R guesses, and what each was drawn from, float32[V], None if it is certain.

        The filters are those of the tokens, the noise is another one: the rule in verified() needs that. Not so for a
        request with a seed, which must get the same tokens however much of them is guessed: its guesses come from the
        noise of its tokens and count as certain. Fewer are right than with the rule.
        """
        scores = penalise(logits, rows)
        ids = self.argmax(scores)
        probs: list[torch.Tensor | None] = [None] * len(rows)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if drawn:
            picked = [rows[i] for i in drawn]
            q = filtered(scores[drawn], picked)
            streams = [DRAFT if row.params.seed is None else 0 for row in picked]
            noise = [uniform(row.seed, row.position, stream) for row, stream in zip(picked, streams, strict=True)]
            ids[drawn] = pick(q, torch.tensor(noise, dtype=torch.float64, device=q.device))
            for i, stream, own in zip(drawn, streams, q, strict=True):
                probs[i] = own if stream == DRAFT else None
        return ids.tolist(), probs

    def probs(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """The distribution each row is drawn from, float32[R, V]; temperature 0 gives all mass to the argmax."""
        scores = penalise(logits, rows).float()
        p = torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if drawn:
            p[drawn] = filtered(scores[drawn], [rows[i] for i in drawn])
        return p


def has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def penalise(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Apply the penalties to the rows that have some, in float32; returns logits itself if none has."""
    affected = [i for i, row in enumerate(rows) if row.counts is not None]
    if not affected:
        return logits
    scores = logits.to(torch.float32, copy=True)
    some = [rows[i] for i in affected]
    x = scores[affected]
    repetition, presence, frequency = (
        column(x, [getattr(row.params, f"{name}_penalty") for row in some])
        for name in ("repetition", "presence", "frequency")
    )
    repetition = repetition.clamp(min=1e-6)  # as for the temperature: no score overflows
    counts = torch.stack([row.counts.output for row in some if row.counts])
    seen = torch.stack([row.counts.seen for row in some if row.counts])
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    scores[affected] = x - presence * (counts > 0) - frequency * counts
    return scores


def filtered(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Probabilities float32[R, V] after temperature, top_k, top_p and min_p; every row has temperature > 0.

    Each filter sees the distribution that the one before it left, renormalised, as transformers' processors do.
    """
    params = [row.params for row in rows]
    scores, vocab = scores.float(), scores.shape[-1]
    # Subtracting the maximum first keeps tiny temperatures finite; it does not change the distribution.
    x = (scores - scores.amax(-1, keepdim=True)) / column(scores, [max(p.temperature, 1e-6) for p in params])
    if any(0 < p.top_k < vocab or p.top_p < 1.0 for p in params):
        ordered, order = x.sort(dim=-1, descending=True, stable=True)
        ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
        kth = ordered.gather(-1, torch.tensor(ks, device=x.device)[:, None] - 1)
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # mass of the tokens ahead of this one: the first always stays
        tops = column(p, [max(q.top_p, 1e-6) for q in params])  # a float32 that is not 0
        ordered = ordered.masked_fill((before >= tops) & (tops < 1.0), -torch.inf)
        x = torch.empty_like(x).scatter_(-1, order, ordered)
    p = x.softmax(-1)
    if any(q.min_p > 0 for q in params):
        p = p.masked_fill(p < p.amax(-1, keepdim=True) * column(p, [q.min_p for q in params]), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def verified(p: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """What to draw from so that the tokens follow p[R, V] although some were guessed (Leviathan et al. 2023).

    A guess d drawn from q is kept with probability min(1, p(d) / q(d)), else the token comes from max(p - q, 0). A
    guess that was certain needs nothing: a draw from p is d with probability p(d), else one of p without d. The rows of
    the result need not add up to 1.
    """
    some = [i for i, row in enumerate(rows) if row.draft_probs is not None]
    if not some:
        return p
    drafted = [rows[i] for i in some]
    target, q = p[some], torch.stack([row.draft_probs for row in drafted if row.draft_probs is not None])
    draft = torch.tensor([row.draft for row in drafted], device=p.device)[:, None]
    u = torch.tensor([uniform(row.seed, row.position, ACCEPT) for row in drafted], dtype=torch.float64)[:, None]
    keep = u.to(p.device) * q.gather(1, draft) < target.gather(1, draft)
    rest = (target - q).clamp(min=0.0)
    nothing = rest.sum(-1, keepdim=True) == 0  # equal distributions, and rounding
    rest = torch.where(nothing, target, rest)
    p[some] = torch.where(keep, torch.zeros_like(q).scatter_(1, draft, 1.0), rest)
    return p


def pick(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse transform: p[R, V], u float64[R] in [0, 1) -> int64[R]. Never picks a token of probability 0."""
    cdf = p.double().cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    picked = torch.searchsorted(cdf, target, right=True)[:, 0]
    return picked.clamp(max=p.shape[-1] - 1)  # of NaN, from a model that overflows, still a token


def logprobs(logits: torch.Tensor, token: int, top: int | None) -> dict[str, Any] | None:
    if top is None:
        return None
    scores = logits.float().log_softmax(-1).nan_to_num(nan=LOWEST, neginf=LOWEST)
    values, ids = scores.topk(min(top, len(scores)))
    best = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {"token_id": token, "logprob": scores[token].item(), "top": best}


def column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """One value per row, shaped [R, 1]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def mix(*values: int) -> int:
    """Hash integers to 64 well-mixed bits (the finaliser of SplitMix64, Steele et al. 2014, after each value)."""
    x = 0
    for value in values:
        x = (x + value + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1), always the same for the same arguments, on any device."""
    return (mix(seed, position, stream) >> 11) * 2.0**-53
