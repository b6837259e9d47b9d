"""The sampler: its filters are those of transformers, its draws follow them, its noise depends on (seed, position) alone."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare, kstest
from transformers.generation import logits_process as hf

VOCAB = 12
DRAWS = 20_000
INF = math.inf


@pytest.fixture
def sampler(engine_chapter):
    """The sampler module of the chapter."""
    return __import__(f"{engine_chapter.__name__}.sampler", fromlist=["Sampler"])


@pytest.fixture
def row(engine_chapter, sampler):
    """row(seed=, position=, prompt=, output=, **params): one SampleRow; prompt and output are token ids."""

    def make(seed=0, position=0, prompt=(), output=(), vocab=VOCAB, **params):
        params = engine_chapter.SamplingParams(**params)
        counts = None
        if sampler.has_penalties(params):
            seen, count = torch.zeros(vocab, dtype=torch.bool), torch.zeros(vocab)
            seen[[*prompt, *output]] = True
            for token in output:
                count[token] += 1
            counts = sampler.TokenCounts(output=count, seen=seen, counted=len(prompt) + len(output))
        return sampler.SampleRow(params, seed, position, counts)

    return make


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def with_ties() -> torch.Tensor:
    return torch.tensor([[1.0, 3.0, 3.0, 0.0, -1.0, 1.0, 3.0, 2.0, 2.0, -INF, 0.0, -1.0]])


LOGITS = {
    "random": random_logits(),
    "flat": random_logits(seed=1, scale=0.1),
    "peaked": random_logits(seed=2, scale=20.0),
    "some impossible": random_logits(seed=3).masked_fill(torch.arange(VOCAB) % 3 == 0, -INF),
    "all but one impossible": torch.full((1, VOCAB), -INF).index_fill(1, torch.tensor(7), -3.0),
    "large vocabulary": random_logits(vocab=5000, seed=4),
}


def of_transformers(logits: torch.Tensor, ids: list[int], **params) -> torch.Tensor:
    """Probabilities by transformers' own processors, in the order of its generate()."""
    steps = []
    if "repetition_penalty" in params:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    steps.append(hf.TemperatureLogitsWarper(params["temperature"]))
    if params.get("top_k", 0) > 0:
        steps.append(hf.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        steps.append(hf.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        steps.append(hf.MinPLogitsWarper(params["min_p"]))
    scores = logits.clone()
    for step in steps:
        scores = step(torch.tensor([ids]), scores)
    return scores.softmax(-1)


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 100.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": VOCAB - 1},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 1e-300},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "min_p": 0.5},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "repetition_penalty": 0.5},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
]


# ---- the distribution


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_are_those_of_transformers(sampler, row, params, logits):
    seen = [0, 3, 7, 7]
    want = of_transformers(logits, seen, **params)
    got = sampler.Sampler(0).probs(logits.clone(), [row(prompt=seen, vocab=logits.shape[1], **params)])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    assert torch.equal(got > 0, want > 0), "the same tokens are possible"


@pytest.mark.parametrize("top_k", range(1, VOCAB))
def test_all_tokens_that_tie_with_the_kth_stay(sampler, row, top_k):
    want = of_transformers(with_ties(), [0], temperature=1.0, top_k=top_k)
    got = sampler.Sampler(0).probs(with_ties(), [row(temperature=1.0, top_k=top_k)])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_top_p_keeps_as_many_of_equal_tokens_as_transformers(sampler, row, top_p):
    """Which of several equal tokens stays is not defined: the probabilities are compared in descending order."""
    want = of_transformers(with_ties(), [0], temperature=1.0, top_p=top_p)
    got = sampler.Sampler(0).probs(with_ties(), [row(temperature=1.0, top_p=top_p)])
    torch.testing.assert_close(got.sort().values, want.sort().values, atol=1e-6, rtol=1e-5)


def test_top_p_is_the_smallest_set_that_reaches_the_mass(sampler, row):
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    for top_p, kept in ((0.3, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.91, 4), (1.0, 4)):
        got = sampler.Sampler(0).probs(logits, [row(vocab=4, temperature=1.0, top_p=top_p)])
        assert int((got > 0).sum()) == kept, top_p


def test_each_filter_sees_what_the_one_before_left(sampler, row):
    """top_k 2 leaves 0.4 and 0.3, renormalised 4/7 and 3/7: top_p 0.5 then keeps one; of the raw 0.4 it would keep two."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    got = sampler.Sampler(0).probs(logits, [row(vocab=4, temperature=1.0, top_k=2, top_p=0.5)])
    assert got.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_presence_and_frequency_penalties_by_their_formula(sampler, row):
    """score - presence * (count > 0) - frequency * count, counts of the output only."""
    logits = random_logits(seed=5)
    prompt, output = [0, 1, 1], [2, 3, 3, 3]
    score = logits[0].tolist()
    for token, count in ((2, 1), (3, 3)):
        score[token] -= 0.7 + 0.4 * count
    params = {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    got = sampler.Sampler(0).probs(logits, [row(prompt=prompt, output=output, **params)])
    torch.testing.assert_close(got[0], torch.tensor(score).softmax(-1), atol=1e-6, rtol=1e-5)


def test_repetition_comes_before_presence_and_frequency(sampler, row):
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    params = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 1.0}
    got = sampler.Sampler(0).probs(logits, [row(vocab=4, prompt=[0], output=[1, 2, 2], **params)])
    want = torch.tensor([2.0 / 2, -2.0 * 2 - 0.75, 1.0 / 2 - 1.0, 0.0]).softmax(-1)
    torch.testing.assert_close(got[0], want)


def test_negative_penalties_raise_the_score_of_the_output(sampler, row):
    logits = torch.zeros(1, 4)
    params = {"presence_penalty": -1.0, "frequency_penalty": -0.5, "temperature": 1.0}
    got = sampler.Sampler(0).probs(logits, [row(vocab=4, output=[3, 3], **params)])
    torch.testing.assert_close(got[0], torch.tensor([0.0, 0.0, 0.0, 2.0]).softmax(-1))


def test_counts_follow_a_request_and_know_prompt_from_output(engine_chapter, sampler):
    core = __import__(f"{engine_chapter.__name__}.core", fromlist=["Req"])
    req = core.Req(0, [1, 2, 2], 3, engine_chapter.SamplingParams(presence_penalty=1.0), 8)
    counts = sampler.TokenCounts.of(req, 6, torch.device("cpu"))
    assert counts.output.tolist() == [0] * 6 and counts.seen.tolist() == [False, True, True, False, False, False]
    for token in (2, 5, 5):
        req.token_ids.append(token)
        counts = sampler.TokenCounts.of(req, 6, torch.device("cpu"))
    assert counts.output.tolist() == [0, 0, 1, 0, 0, 2]
    assert counts.seen.tolist() == [False, True, True, False, False, True]


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-4, 100.0])
def test_extreme_temperatures_give_a_finite_distribution(sampler, row, temperature):
    for logits in (*LOGITS.values(), random_logits(scale=1e4), with_ties()):
        p = sampler.Sampler(0).probs(logits, [row(temperature=temperature)])
        assert torch.isfinite(p).all() and p.sum().item() == pytest.approx(1, abs=1e-4)
        if temperature < 1e-3:
            best = logits == logits.max()
            torch.testing.assert_close(p, best / best.sum(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-6, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
def test_extreme_penalties_still_give_a_token_of_the_vocabulary(sampler, row, penalty, temperature):
    for seed, logits in enumerate((*list(LOGITS.values())[:5], with_ties(), random_logits(scale=1e4))):
        one = row(seed=seed, output=[0, 1, 2, 3, 7], temperature=temperature, repetition_penalty=penalty, top_p=0.9)
        p = sampler.Sampler(0).probs(logits, [one])
        assert torch.isfinite(p).all() and p.sum().item() == pytest.approx(1, abs=1e-4)
        [token], _ = sampler.Sampler(0).sample(logits, [one])
        assert p[0, token] > 0


# ---- the draws follow the distribution


DRAWN = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.3},
]


def assert_follows(drawn: torch.Tensor, p: torch.Tensor) -> None:
    """Chi-square test of token ids against probabilities p[V]; nothing of probability 0 was drawn."""
    seen = torch.bincount(drawn, minlength=len(p)).double()
    possible = p > 0
    assert not seen[~possible].any(), "a token of probability 0 was drawn"
    want = p[possible].double()
    if len(want) > 1:
        result = chisquare(seen[possible].numpy(), (want / want.sum() * len(drawn)).numpy())
        assert result.pvalue > 1e-3, (seen.tolist(), p.tolist())


@pytest.mark.parametrize("params", DRAWN, ids=str)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_samples_follow_the_distribution(sampler, row, params, vary):
    """Over the positions of one request, and over the seeds of many."""
    logits = random_logits(seed=6, scale=1.0)
    one = row(prompt=[1, 2], output=[3, 3, 4], **params)
    rows = [sampler.SampleRow(one.params, 11, 5, one.counts) for _ in range(DRAWS)]
    for i, each in enumerate(rows):
        setattr(each, vary, i)
    p = sampler.Sampler(0).probs(logits, [one])[0]
    ids, _ = sampler.Sampler(0).sample(logits.expand(DRAWS, -1), rows)
    assert_follows(torch.tensor(ids), p)


def test_pick_never_returns_a_token_of_probability_zero(sampler):
    p = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for u, want in ((0.0, 2), (0.2499, 2), (0.25, 4), (0.7499, 4), (0.75, 5), (1 - 2**-53, 5), (1.0, 5)):
        assert sampler.pick(p[None], torch.tensor([u], dtype=torch.float64)).item() == want, u


def test_pick_reaches_the_edges_of_a_large_vocabulary(sampler):
    p = random_logits(vocab=50_000, seed=7).softmax(-1)
    p[0, :10] = p[0, -10:] = 0.0
    for u, want in ((0.0, 10), (1 - 2**-53, 49_989)):
        assert sampler.pick(p, torch.tensor([u], dtype=torch.float64)).item() == want


def test_logits_that_overflowed_still_give_a_token(sampler, row):
    """float16 models do that; the request gets nonsense, the engine and its other requests go on."""
    logits = torch.full((3, VOCAB), torch.nan)
    logits[2] = random_logits()[0]
    rows = [row(temperature=1.0, top_p=0.9), row(), row(temperature=1.0)]
    ids, _ = sampler.Sampler(0).sample(logits, rows)
    assert all(0 <= token < VOCAB for token in ids)
    assert ids[2] == sampler.Sampler(0).sample(logits[2:], rows[2:])[0][0]


# ---- greedy rows and batch-mates


def mixed_rows(row) -> list:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.0, "top_k": 5, "min_p": 0.2},
        {"temperature": 2.0, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 1.0},
    ]
    return [row(seed=100 + i, position=3 * i, output=[i, i + 1], **kinds[i % len(kinds)]) for i in range(VOCAB - 1)]


@pytest.mark.fault(7)
def test_temperature_zero_is_exact_argmax_in_a_mixed_batch(sampler, row):
    """Two logits one ulp apart: only an argmax, no sampling at a tiny temperature, tells them apart."""
    rows = mixed_rows(row)
    logits = random_logits(len(rows), seed=8)
    best = logits.argmax(-1)
    peak = torch.full((len(rows),), 50.0)
    logits[torch.arange(len(rows)), best] = torch.nextafter(peak, peak + 1)
    logits[torch.arange(len(rows)), (best + 1) % VOCAB] = peak
    ids, _ = sampler.Sampler(0).sample(logits, rows)
    greedy = [i for i, r in enumerate(rows) if r.params.temperature == 0]
    assert len(greedy) >= 4
    assert [ids[i] for i in greedy] == best[greedy].tolist()


def test_greedy_takes_the_argmax_of_the_penalised_scores(sampler, row):
    logits = torch.tensor([[3.0, 2.9, 0.0, 0.0], [3.0, 2.9, 0.0, 0.0]])
    ids, _ = sampler.Sampler(0).sample(logits, [row(vocab=4, prompt=[0], repetition_penalty=1.5), row(vocab=4)])
    assert ids == [1, 0]


def test_probs_of_a_greedy_row_are_one_at_the_argmax(sampler, row):
    p = sampler.Sampler(0).probs(with_ties(), [row(temperature=0.0, top_p=0.5)])
    assert p.tolist() == [[0.0, 1.0] + [0.0] * 10], "of equal scores the first"


def test_a_sample_depends_neither_on_batch_mates_nor_on_order(sampler, row):
    rows = mixed_rows(row)
    logits = random_logits(len(rows), seed=9)
    together, _ = sampler.Sampler(0).sample(logits, rows)
    alone = [sampler.Sampler(0).sample(logits[i : i + 1], [rows[i]])[0][0] for i in range(len(rows))]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled, _ = sampler.Sampler(0).sample(logits[order], [rows[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_sampling_leaves_the_logits_as_they_were(sampler, row):
    rows = mixed_rows(row)
    logits = random_logits(len(rows), seed=10)
    kept = logits.clone()
    sampler.Sampler(0).sample(logits, rows)
    sampler.Sampler(0).probs(logits, rows)
    assert torch.equal(logits, kept)


# ---- the noise


SEEDS = [0, 1, -1, 2**31, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_a_function_of_seed_and_position(sampler, row, seed):
    logits = random_logits(50, seed=11, scale=0.1)
    rows = [row(seed=seed, position=at, temperature=1.0) for at in range(50)]
    first, _ = sampler.Sampler(0).sample(logits, rows)
    again, _ = sampler.Sampler(99).sample(logits, rows)
    other, _ = sampler.Sampler(0).sample(logits, [row(seed=seed ^ 1, position=at, temperature=1.0) for at in range(50)])
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_is_in_the_unit_interval_and_well_distributed(sampler, seed):
    over_positions = [sampler.uniform(seed, position) for position in range(5000)]
    over_seeds = [sampler.uniform(seed + i, 7) for i in range(5000)]
    over_streams = [sampler.uniform(seed, 7, stream) for stream in range(5000)]
    for values in (over_positions, over_seeds, over_streams):
        assert all(0 <= u < 1 for u in values)
        assert len(set(values)) == len(values)
        assert kstest(values, "uniform").pvalue > 1e-3
        lagged = torch.corrcoef(torch.tensor([values[:-1], values[1:]], dtype=torch.float64))[0, 1]
        assert abs(lagged) < 0.06, "neighbours are independent"


def test_uniform_does_not_confuse_seed_with_position(sampler):
    grid = {sampler.uniform(seed, position) for seed in range(100) for position in range(100)}
    assert len(grid) == 10_000


def test_unseeded_rows_differ_by_request_and_by_engine_seed(engine_chapter, sampler):
    core = __import__(f"{engine_chapter.__name__}.core", fromlist=["Req"])

    def seeds(engine_seed: int) -> list[int]:
        params = [engine_chapter.SamplingParams(temperature=1.0, seed=s) for s in (None, None, 5)]
        items = [core.ScheduledReq(core.Req(rid, [1, 2], 2, p, 8), 2) for rid, p in enumerate(params)]
        rows = sampler.Sampler(engine_seed).rows(core.Batch(items), VOCAB, torch.device("cpu"))
        assert [r.position for r in rows] == [2, 2, 2]
        return [r.seed for r in rows]

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again
    assert len({*first[:2], *other[:2]}) == 4
    assert first[2] == other[2] == 5


# ---- log-probabilities


def test_logprobs_are_those_of_the_raw_logits(sampler, row):
    logits = random_logits(2, seed=12)
    rows = [
        row(temperature=0.5, top_k=1, output=[0], presence_penalty=2.0, logprobs=3),
        row(temperature=0.0),
    ]
    ids, details = sampler.Sampler(0).sample(logits, rows)
    want = logits[0].log_softmax(-1)
    assert details[1] is None
    assert details[0]["token_id"] == ids[0]
    assert details[0]["logprob"] == pytest.approx(want[ids[0]].item(), abs=1e-5)
    best = want.topk(3)
    assert list(details[0]["top"]) == best.indices.tolist()
    assert list(details[0]["top"].values()) == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), float("inf")])
def test_logprobs_of_logits_that_are_no_numbers_are_numbers_all_the_same(sampler, row, broken):
    """JSON has neither NaN nor infinities."""
    logits = random_logits()
    logits[0, 3] = broken
    _, [detail] = sampler.Sampler(0).sample(logits, [row(logprobs=VOCAB)])
    assert all(-9999.0 <= value <= 0.0 for value in (detail["logprob"], *detail["top"].values()))


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_as_many_top_logprobs_as_asked_for_and_as_there_are(sampler, row, top):
    _, [detail] = sampler.Sampler(0).sample(random_logits(), [row(logprobs=top)])
    assert len(detail["top"]) == min(top, VOCAB)
