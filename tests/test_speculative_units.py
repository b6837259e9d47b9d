"""The parts of speculation on small literal inputs: n-gram index, how much is guessed, what counts as agreed."""

from __future__ import annotations

import random

import pytest
import torch

from tests.conftest import chapter
from tests.scheduling import part
from tests.speculation import SPECULATIVE, Prophet, speculator_of


@pytest.fixture(params=SPECULATIVE)
def module(request):
    """Every chapter that speculates, in turn."""
    return chapter(request.param)


@pytest.fixture
def spec(module):
    return part(module, "speculative")


def req_of(module, tokens, prompt_len=1, max_tokens=100, **params):
    core = part(module, "core")
    req = core.Req(0, list(tokens), prompt_len, module.SamplingParams(**params), max_tokens)
    req.speculation = part(module, "speculative").Speculation()
    req.state, req.cached_len = core.ReqState.DECODE, len(tokens) - 1
    return req


# ---- n-grams


@pytest.mark.parametrize(
    ("tokens", "count", "want"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([1, 2, 3, 9, 1, 2], 6, [3, 9, 1, 2, 3, 9]),  # a text that repeats itself goes on and on
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the last occurrence
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, [5]),  # the longest match before the last one
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        ([1, 2, 3, 4], 4, []),
        ([1, 2], 4, []),
        ([1], 4, []),
        ([1, 2, 9, 2], 4, []),  # one token is no evidence
    ],
)
def test_prompt_lookup(module, spec, tokens, count, want):
    [guess] = spec.NgramProposer().propose([(req_of(module, tokens), count)])
    assert guess.tokens == want and guess.probs == []


def continuation(tokens: list[int], ngrams: tuple[int, ...]) -> int | None:
    """By brute force: the position after the last earlier occurrence of the longest n-gram that ends the tokens."""
    for n in ngrams:
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:] and len(tokens) >= n:
                return end
    return None


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_a_search_finds_however_the_text_grows(spec, seed):
    rng = random.Random(seed)
    index, tokens = spec.NgramIndex(), [rng.randrange(3) for _ in range(rng.randint(1, 20))]
    for _ in range(60):
        index.extend(tokens)
        assert index.find(tokens) == continuation(tokens, spec.NGRAMS)
        tokens += [rng.randrange(1 + seed % 5) for _ in range(rng.choice((1, 1, 2, 9)))]


def test_each_token_is_looked_at_once(spec):
    class Counting(list):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    tokens, index = Counting(range(5000)), spec.NgramIndex()
    index.extend(tokens)
    before = Counting.reads
    for token in range(10):
        tokens.append(token)
        index.extend(tokens)
        index.find(tokens)
    assert Counting.reads - before <= 10 * 2 * len(spec.NGRAMS)


# ---- how many


def test_lengths_follow_the_rate_and_what_a_row_costs(spec):
    record = spec.Speculation(rate=0.5)
    assert [record.length(worth, 64) for worth in (0.6, 0.5, 0.3, 0.25, 0.1, 0.05)] == [0, 1, 1, 2, 3, 4]
    assert spec.Speculation(rate=1.0).length(0.9, 7) == 7
    assert spec.Speculation(rate=0.9).length(0.05, 0) == 0


def test_hopeless_text_costs_little_and_is_tried_again(spec):
    """One request, every guess wrong: the rows of 128 steps that verify guesses, and when the last ones were."""
    record, worth, lengths = spec.Speculation(), 1 / 21, []
    for _ in range(128):
        lengths.append(record.length(worth, 8))
        if lengths[-1]:
            record.learn(lengths[-1], 0)
    assert sum(lengths) < 45 and max(lengths[40:]) == 1
    assert 3 <= sum(lengths[40:]) <= 6, "a probe now and then"


def test_a_request_that_becomes_predictable_gets_its_guesses_back(spec):
    record, worth = spec.Speculation(rate=0.0), 1 / 21
    steps = 0
    while record.length(worth, 8) < 8:
        steps += 1
        count = record.length(worth, 8)
        if count:
            record.learn(count, count)
        assert steps < 60


def test_a_record_moves_with_each_outcome(spec):
    record = spec.Speculation(rate=0.5, idle=9)
    record.learn(3, 2)
    assert record.idle == 0
    assert record.rate == pytest.approx((1 - 0.5 * 0.8 * 0.8) * 0.8), "two were right, the third was not"
    record.learn(2, 2)
    assert record.rate == pytest.approx(1 - (1 - (1 - 0.5 * 0.8 * 0.8) * 0.8) * 0.8 * 0.8)


def test_a_row_is_worth_more_the_fewer_there_are(module, spec):
    core = part(module, "core")
    speculator = spec.Speculator(spec.NgramProposer(), 8, free_rows=20)

    def worth(decodes: int, prefill: int = 0) -> float:
        items = [core.ScheduledReq(req_of(module, [1, 2, 3]), 1) for _ in range(decodes)]
        if prefill:
            chunk = core.Req(9, [1] * 200, 200, module.SamplingParams(), 9)
            items.append(core.ScheduledReq(chunk, prefill))
        return speculator.worth(items)

    assert worth(1) == pytest.approx(1 / 21)
    assert worth(64) == pytest.approx(64 / 84)
    assert worth(1, 99) == pytest.approx(1 / 120), "a step that is long anyway"


def test_what_is_left_is_shared_and_nothing_beyond_max_tokens(module, spec):
    core = part(module, "core")
    prophet = Prophet(lambda req: [7] * 100, 0, wrong=0.0)
    prophet._draft = lambda req, count: [7] * count
    speculator = speculator_of(module, prophet)
    reqs = [req_of(module, [1, 2], max_tokens=m) for m in (100, 3, 2, 1, 100)]
    items = [core.ScheduledReq(req, 1) for req in reqs]
    assert {reqs.index(item.req): len(g.tokens) for item, g in speculator.guess(items, 100)} == {0: 8, 1: 1, 4: 8}
    assert {reqs.index(item.req): len(g.tokens) for item, g in speculator.guess(items, 9)} == {0: 1, 1: 1, 4: 7}
    assert speculator.guess(items, 0) == []
    items[0].req.state = core.ReqState.PREFILL
    assert [reqs.index(item.req) for item, _ in speculator.guess(items, 100)] == [1, 4]


@pytest.mark.parametrize(
    ("draft", "tokens", "want"),
    [([], [5], 0), ([5], [5, 6], 1), ([4], [5, 6], 0), ([5, 6, 7], [5, 6, 8, 9], 2), ([4, 6], [5, 6, 7], 0)],
)
def test_agreement_ends_at_the_first_difference(spec, draft, tokens, want):
    assert spec.agreeing(draft, tokens) == want


# ---- rows


def test_parts_of_a_step_and_their_rows(module):
    core = part(module, "core")
    req = req_of(module, [1, 2, 3])
    item = core.ScheduledReq(req, 3, [8, 9])
    assert item.samples and item.rows == 3
    assert core.ScheduledReq(req, 1).rows == 1
    req.cached_len = 0
    assert not core.ScheduledReq(req, 2).samples and core.ScheduledReq(req, 2).rows == 0


def test_penalties_count_the_guesses_before_a_position(module):
    sampler, core = part(module, "sampler"), part(module, "core")
    req = req_of(module, [1, 2, 3], frequency_penalty=1.0, temperature=1.0)
    item = core.ScheduledReq(req, 4, [5, 5, 0], [torch.tensor([float(i)]) for i in range(3)])
    rows = sampler.Sampler(0).rows(core.Batch([item]), 6, torch.device("cpu"))
    assert [row.position for row in rows] == [3, 4, 5, 6]
    assert [row.counts.output.tolist() for row in rows] == [
        [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 2], [1, 0, 1, 1, 0, 2],
    ]  # fmt: skip
    assert [row.counts.seen.tolist() for row in rows[::3]] == [
        [False] + [True] * 3 + [False] * 2,
        [True] * 4 + [False, True],
    ]
    assert [row.draft for row in rows] == [5, 5, 0, None]
    assert [None if row.draft_probs is None else row.draft_probs.item() for row in rows] == [0.0, 1.0, 2.0, None]
    assert req.sampler_state.output.tolist() == [0, 0, 1, 1, 0, 0], "the request's own counts stay"


def test_the_flat_input_of_a_step_with_drafts(module):
    """Two requests: a decode with two guesses, and a prompt of three tokens."""
    core, runner = part(module, "core"), part(module, "model_runner")
    kv = part(module, "kvcache").KVCache(1, 8, 2, 1, 1, torch.empty(0))
    first, second = req_of(module, [4, 5, 6]), core.Req(1, [7, 8, 9], 3, module.SamplingParams(), 9)
    first.cached_len = 0
    for req, count in ((first, 5), (second, 3)):
        kv.allocate(req, count)
    first.cached_len = 2
    batch = core.Batch([core.ScheduledReq(first, 3, [1, 2]), core.ScheduledReq(second, 3)])
    inp = runner.ModelRunner(None, kv, None, torch.device("cpu")).prepare(batch)
    assert inp.ids.tolist() == [6, 1, 2, 7, 8, 9]
    assert inp.positions.tolist() == [2, 3, 4, 0, 1, 2]
    assert inp.seq_lens.tolist() == [5, 3] and inp.cu_extend.tolist() == [0, 3, 6]
    assert inp.logit_rows.tolist() == [0, 1, 2, 5]
