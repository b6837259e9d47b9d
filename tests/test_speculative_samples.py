"""Sampling with speculation follows the distribution of sampling without it, for every sampling parameter."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import islice

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from common.tiny import cached_tiny_model
from tests.conftest import chapter
from tests.scheduling import part
from tests.speculation import NEVER_DEAR, SPECULATIVE
from tests.test_batching_parity import small_pool
from tests.test_parity import options
from tests.test_sampler import FILTERS, VOCAB

MORE_FILTERS = [
    *FILTERS,
    {"temperature": 1.0, "presence_penalty": 1.5},
    {"temperature": 0.9, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "top_k": 6},
]
SMALL = 12  # vocabulary of the models below
PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 1.2, "repetition_penalty": 1.6},
    {"temperature": 1.2, "presence_penalty": 1.5},
    {"temperature": 1.2, "frequency_penalty": 1.2},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]


@pytest.fixture(params=SPECULATIVE)
def module(request):
    """Every chapter that speculates, in turn."""
    return chapter(request.param)


# ---- one token


@pytest.mark.fault(18)
def test_the_rule_in_small_numbers(module):
    sampler = part(module, "sampler")
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([0.2, 0.7, 0.1])
    seen = set()
    for seed in range(40):
        row = sampler.SampleRow(module.SamplingParams(temperature=1.0), seed, 9, draft=1, draft_probs=q)
        keep = sampler.uniform(seed, 9, sampler.ACCEPT) * 0.7 < 0.3
        want = [0.0, 1.0, 0.0] if keep else [0.5 - 0.2, 0.0, 0.2 - 0.1]
        assert sampler.verified(p.clone(), [row])[0].tolist() == pytest.approx(want)
        seen.add(keep)
    assert seen == {True, False}
    row.draft = 0
    assert sampler.verified(p.clone(), [row])[0].tolist() == [1.0, 0.0, 0.0], "p(d) > q(d): always kept"
    row.draft_probs = p[0]
    assert sampler.verified(p.clone(), [row])[0].tolist() == [1.0, 0.0, 0.0], "equal distributions: always kept"


def test_a_token_that_the_filters_exclude_is_never_kept(module):
    sampler = part(module, "sampler")
    p, q = torch.tensor([[0.0, 1.0]]), torch.tensor([0.9, 0.1])
    for seed in range(50):
        row = sampler.SampleRow(module.SamplingParams(temperature=1.0), seed, 0, draft=0, draft_probs=q)
        assert sampler.verified(p.clone(), [row]).argmax() == 1


def draws(module, params, certain: bool, count: int) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Drawn tokens [count], their distribution p[VOCAB], the share of guesses that were accepted, and what it should be.
    Four of five rows have a guess, or, of certain ones, all."""
    sampler = part(module, "sampler")
    one = sampler.Sampler(0)
    generator = torch.Generator().manual_seed(5)
    logits, other = (2.0 * torch.randn(1, VOCAB, generator=generator) for _ in range(2))
    own = module.SamplingParams(**params)
    counts = None
    if sampler.has_penalties(own):
        output = torch.tensor([2.0, 0, 1, 0, 0, 3, 0, 0, 1, 0, 0, 0])
        counts = sampler.TokenCounts(output, output > 0, 7)
    rows = [sampler.SampleRow(own, seed, 3, counts) for seed in range(count)]  # noise of its own, but no wish for it
    guesses, probs = one.guess(other.expand(count, -1), rows)
    for i, row in enumerate(rows):
        if i % 5:
            row.draft, row.draft_probs = guesses[i], probs[i]
        if certain:
            row.draft, row.draft_probs = 4, None
    ids, _ = one.sample(logits.expand(count, -1).clone(), rows)
    kept = [row.draft == token for row, token in zip(rows, ids, strict=True) if row.draft is not None]
    p, q = (one.probs(scores.clone(), rows[:1])[0] for scores in (logits, other))
    return torch.tensor(ids), p, sum(kept) / len(kept), float(p[4] if certain else torch.minimum(p, q).sum())


@pytest.mark.parametrize("certain", [False, True], ids=["drawn guesses", "certain guesses"])
@pytest.mark.parametrize("params", MORE_FILTERS, ids=str)
def test_one_token_follows_the_distribution_of_the_model(module, params, certain, request):
    count = 40_000 if request.config.getoption("--full") else 8_000
    ids, want, kept, most = draws(module, params, certain, count)
    found = torch.bincount(ids, minlength=VOCAB)
    possible = want > 0
    assert not found[~possible].any()
    if possible.sum() > 1:
        expected = want[possible].double()
        assert chisquare(found[possible].numpy(), (expected / expected.sum() * count).numpy()).pvalue > 1e-3
    assert kept == pytest.approx(most, abs=4 * (0.25 / (0.8 * count)) ** 0.5), "as many as can be"


# ---- whole requests


def model_of(arch: str) -> str:
    return str(cached_tiny_model(arch, vocab_size=SMALL))


@functools.cache
def runs(name: str, at: int, draft: bool, count: int) -> tuple[Counter[tuple[int, ...]], float]:
    """How often each output of 5 tokens came for PARAMS[at], and the share of guesses that were accepted."""
    module = chapter(name)
    more = {"speculative": "draft", "draft_model": model_of("qwen3")} if draft else {}
    more["seed"] = 1 + draft  # the two samples are independent
    params = module.SamplingParams(max_tokens=5, ignore_eos=True, **PARAMS[at])
    with module.LLM(model_of("llama"), max_batch_tokens=512, num_draft_tokens=3, **options(**more)) as llm:
        if draft:
            speculator = llm.engine.scheduler.speculator
            speculator.free_rows, speculator.proposer.cost = NEVER_DEAR, 0.0
        outputs = llm.generate([[5, 7, 3]] * count, params, progress=False)
        stats = llm.stats()
    return Counter(tuple(o.token_ids) for o in outputs), stats["accepted_tokens"] / max(1, stats["draft_tokens"])


def assert_same_distribution(a: Counter, b: Counter) -> None:
    """A chi-square test of homogeneity; outcomes that came less than ten times are one cell."""
    rare = [key for key in a | b if a[key] + b[key] < 10]
    cells = [(a[key], b[key]) for key in a | b if key not in set(rare)]
    cells.append((sum(a[key] for key in rare), sum(b[key] for key in rare)))
    table = [cell for cell in cells if sum(cell)]
    assert len(table) > 1
    assert chi2_contingency(torch.tensor(table).T.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("at", range(len(PARAMS)), ids=[str(params) for params in PARAMS])
def test_outputs_have_the_distribution_of_those_without_speculation(module, at, request):
    """Pairs of neighbours and whole outputs, against independent samples."""
    count = 6000 if request.config.getoption("--full") else 1200
    plain, _ = runs(module.__name__, at, False, count)
    guessed, rate = runs(module.__name__, at, True, count)
    assert 0.02 < rate < 0.98, "guesses of both kinds"
    assert_same_distribution(plain, guessed)
    for start in range(4):
        pairs = [Counter() for _ in range(2)]
        for found, counted in zip(pairs, (plain, guessed), strict=True):
            for output, times in counted.items():
                found[tuple(islice(output, start, start + 2))] += times
        assert_same_distribution(*pairs)


@pytest.mark.fault(18)
def test_a_request_with_a_seed_gets_the_same_tokens_whatever_is_guessed(module):
    """Alone, in company, with budgets that cut its drafts, in a pool that is too small, and without speculation."""

    def outputs(together: bool = True, **more) -> list[list[int]]:
        params = [
            module.SamplingParams(max_tokens=25, ignore_eos=True, temperature=1.3, seed=i, top_k=9) for i in range(12)
        ]
        with module.LLM(model_of("llama"), **options(**more)) as llm:
            if speculator := llm.engine.scheduler.speculator:
                speculator.free_rows, speculator.proposer.cost = NEVER_DEAR, 0.0
            prompts = [[1 + i % 11, 3] for i in range(12)]
            if together:
                found = [o.token_ids for o in llm.generate(prompts, params, progress=False)]
            else:
                pairs = zip(prompts, params, strict=True)
                found = [llm.generate([p], [s], progress=False)[0].token_ids for p, s in pairs]
            stats.append(llm.stats())
        return found

    stats: list[dict[str, int]] = []
    way = {"speculative": "draft", "draft_model": model_of("qwen3")}
    want = outputs()
    assert outputs(False, **way) == outputs(**way) == outputs(max_batch_tokens=17, **way) == want
    assert outputs(page_size=1, kv_memory=small_pool(module, 1, 120), max_batch_tokens=200, **way) == want
    assert stats[-1]["preemptions"] > 0 and all(5 < s["accepted_tokens"] < s["draft_tokens"] for s in stats[1:])
    assert len(set(map(tuple, want))) == 12


def test_rows_with_temperature_0_are_greedy_beside_drawn_ones(module):
    with module.LLM(model_of("llama"), **options()) as llm:
        [want] = llm.generate([[5, 7, 3]], module.SamplingParams(max_tokens=30, ignore_eos=True), progress=False)
    more = {"speculative": "draft", "draft_model": model_of("qwen3")}
    with module.LLM(model_of("llama"), **options(**more)) as llm:
        params = [
            module.SamplingParams(max_tokens=30, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 1.5, 0.0, 0.8)
        ]
        got = llm.generate([[5, 7, 3]] * 4, params, progress=False)
    assert got[0].token_ids == got[2].token_ids == want.token_ids
    assert got[1].token_ids != want.token_ids
