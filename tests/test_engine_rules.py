"""What every engine keeps to, whatever its mechanism: where a request ends, its samples, its log-probabilities."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from common.checkpoints import resolve
from common.tiny import EOS_IDS, cached_tiny_model, tiny_model
from tests.engine_runs import OTHER, PROMPT, engines_of, first_new, params_of, run
from tests.oracle import assert_greedy, hf_logits


@pytest.fixture
def params(engine_chapter):
    return params_of(engine_chapter)


@pytest.fixture
def engine(engine_chapter):
    yield from engines_of(engine_chapter)


def generation(folder, **changes) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- how many tokens, and where they end


@pytest.mark.fault(1)
@pytest.mark.parametrize("wanted", [1, 2, 5, 10])
def test_exactly_max_tokens(engine, params, wanted):
    llm = engine()
    outputs = run(llm, [PROMPT, OTHER, PROMPT[:1]], params(max_tokens=wanted))
    for output in outputs:
        assert len(output.token_ids) == wanted
        assert output.finish_reason == "length"


def test_the_first_tokens_do_not_depend_on_max_tokens(engine, params):
    llm = engine()
    [longest] = run(llm, [PROMPT], params(max_tokens=10))
    for wanted in range(1, 10):
        [output] = run(llm, [PROMPT], params(max_tokens=wanted))
        assert output.token_ids == longest.token_ids[:wanted]


def test_offline_max_tokens_is_128_or_what_the_context_leaves(engine, params):
    llm = engine(max_model_len=200)
    outputs = run(llm, [PROMPT, [5] * 150], params(max_tokens=None))
    assert [len(output.token_ids) for output in outputs] == [128, 50]
    assert [output.finish_reason for output in outputs] == ["length", "length"]


def test_without_params_it_is_greedy(engine, engine_chapter):
    llm = engine(max_model_len=40)
    [output] = llm.generate([PROMPT], progress=False)
    [want] = run(llm, [PROMPT], engine_chapter.SamplingParams(temperature=0.0))
    assert output.token_ids == want.token_ids
    assert_greedy(cached_tiny_model("llama"), PROMPT, output.token_ids)


def test_a_request_ends_at_max_model_len_exactly(engine, params):
    llm = engine(max_model_len=20)
    outputs = run(llm, [PROMPT, PROMPT], [params(max_tokens=13), params(max_tokens=14)])
    assert len(outputs[0].token_ids) == 13 and outputs[0].finish_reason == "length"
    assert outputs[1].finish_reason == "error" and outputs[1].token_ids == []
    assert all(number in outputs[1].error for number in ("7", "14", "21", "20"))


def test_the_longest_prompt_gets_its_one_token(engine, params):
    llm = engine(max_model_len=20)
    outputs = run(llm, [[5] * 19, [5] * 20], params(max_tokens=None))
    assert len(outputs[0].token_ids) == 1 and outputs[0].finish_reason == "length"
    assert outputs[1].finish_reason == "error" and "20" in outputs[1].error


def test_max_model_len_beyond_the_model_is_refused(engine):
    with pytest.raises(ValueError, match=r"513.*512"):
        engine(max_model_len=513)


@pytest.mark.fault(2, 28)
@pytest.mark.parametrize("where", ["generation list", "generation", "config", "config list", "both"])
def test_every_eos_id_ends_a_request_and_nothing_follows(engine, params, tmp_path, where):
    """The EOS is a token that this model is known to produce; it is counted, and has no text."""
    free = run(engine(), [PROMPT], params(max_tokens=30))[0]
    at = first_new(free.token_ids)
    token = free.token_ids[at]
    in_config = {"config": token, "config list": [1, token], "both": [1, token]}.get(where, EOS_IDS[0])
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=in_config)
    lists = {"generation list": [1, 0, token], "generation": token}
    generation(folder, eos_token_id=lists.get(where, 0))
    assert token in resolve(str(folder)).eos_ids
    llm = engine(folder)
    ended, ignored = run(llm, [PROMPT, PROMPT], [params(ignore_eos=False, max_tokens=30), params(max_tokens=30)])
    assert ended.token_ids == free.token_ids[: at + 1]
    assert ended.finish_reason == "stop"
    assert ended.text == llm.tokenizer.decode(free.token_ids[:at])
    assert ignored.token_ids == free.token_ids and ignored.finish_reason == "length"


def test_eos_as_the_last_allowed_token_is_a_stop(engine, params, tmp_path):
    free = run(engine(), [PROMPT], params(max_tokens=30))[0]
    at = first_new(free.token_ids)
    folder = tiny_model("llama", tmp_path / "model")
    generation(folder, eos_token_id=[free.token_ids[at]])
    outputs = run(engine(folder), [PROMPT] * 2, [params(ignore_eos=False, max_tokens=n) for n in (at + 1, at)])
    assert [output.finish_reason for output in outputs] == ["stop", "length"]
    assert [len(output.token_ids) for output in outputs] == [at + 1, at]


def test_special_tokens_are_counted_and_have_no_text(engine, params, tmp_path):
    """<|im_start|> among other tokens: with its embedding row on top of the vocabulary it comes often."""
    llm = engine()
    special = [0, 1, 2, 3]
    text = llm.tokenizer.decode([*PROMPT, 1, *OTHER])
    assert text == llm.tokenizer.decode([*PROMPT, *OTHER])
    outputs = run(llm, [[5] * n for n in range(1, 60)], params(temperature=2.0, max_tokens=20))
    assert any(set(special) & set(output.token_ids) for output in outputs), "not a test otherwise"
    for output in outputs:
        assert len(output.token_ids) == 20
        assert "<|" not in output.text


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_token_ids(engine, params, ignore_eos):
    """They hold with ignore_eos too; the token is counted and, like an EOS, has no text."""
    llm = engine()
    [free] = run(llm, [PROMPT], params(max_tokens=30))
    at = first_new(free.token_ids)
    stopped = params(max_tokens=30, ignore_eos=ignore_eos, stop_token_ids=[free.token_ids[at], 999])
    [output] = run(llm, [PROMPT], stopped)
    assert output.token_ids == free.token_ids[: at + 1]
    assert output.finish_reason == "stop"
    assert output.text == llm.tokenizer.decode(free.token_ids[:at])


# ---- stop strings


def test_stop_strings_across_token_boundaries(engine, params):
    """Every substring of the output: the text ends before its first place, the ids with the token that completes it."""
    llm = engine()
    [free] = run(llm, [OTHER], params(max_tokens=12))
    text = free.text
    ends = [len(llm.tokenizer.decode(free.token_ids[:n]).rstrip("\ufffd")) for n in range(13)]
    tried = 0
    for start, length in itertools.product(range(len(text)), (1, 2, 4, 7)):
        stop = text[start : start + length]
        if len(stop) < length or "\ufffd" in stop:
            continue
        [output] = run(llm, [OTHER], params(max_tokens=12, stop=stop))
        cut = text.find(stop)
        tokens = next(n for n in range(13) if ends[n] >= cut + length)
        assert output.text == text[:cut], stop
        assert output.token_ids == free.token_ids[:tokens], stop
        assert output.finish_reason == "stop"
        tried += 1
    assert tried > 20


def test_the_first_of_several_stop_strings_counts(engine, params):
    llm = engine()
    [free] = run(llm, [OTHER], params(max_tokens=24))
    clean = free.text.split("\ufffd")[0] or free.text
    early, late = clean[1:3], clean[3:6]
    assert early and late and early != late
    for stop in ([early, late], [late, early], ["never there", early]):
        [output] = run(llm, [OTHER], params(max_tokens=24, stop=stop))
        assert output.text == free.text[: free.text.find(early)]


def test_a_stop_string_that_never_comes_changes_nothing(engine, params):
    """Not even where its beginning ends the text, which is held back until it is known not to go on."""
    llm = engine()
    [free] = run(llm, [OTHER], params(max_tokens=24))
    for stop in ("no such text", free.text[-1] + "…", free.text[-3:] + "!"):
        [output] = run(llm, [OTHER], params(max_tokens=24, stop=[stop]))
        assert (output.text, output.token_ids, output.finish_reason) == (free.text, free.token_ids, "length")


# ---- params are per request


@pytest.mark.fault(12)
def test_one_params_object_serves_many_requests_unchanged(engine, params):
    shared = params(max_tokens=6, temperature=0.8, seed=3, stop=["zzz"], stop_token_ids=[999], logprobs=2)
    before = repr(shared)
    outputs = run(engine(max_model_len=64), [PROMPT, [5] * 60, PROMPT, OTHER], shared)
    assert repr(shared) == before
    assert [len(output.token_ids) for output in outputs] == [6, 0, 6, 6], "the second does not fit"
    assert outputs[0].token_ids == outputs[2].token_ids


def test_params_cannot_be_changed(params):
    with pytest.raises(AttributeError):
        params().max_tokens = 3


BAD = [
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": True}, {"temperature": -0.1},
    {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "1"}, {"top_k": -2}, {"top_k": 1.0},
    {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan},
    {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0}, {"repetition_penalty": math.inf},
    {"presence_penalty": 2.1}, {"presence_penalty": math.nan}, {"frequency_penalty": -2.1}, {"stop": ""},
    {"stop": ["a", ""]}, {"stop": [1]}, {"stop": 1}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]},
    {"stop_token_ids": 5}, {"seed": 0.5}, {"seed": 2**64}, {"ignore_eos": 1}, {"logprobs": -1}, {"logprobs": 21},
    {"logprobs": True},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD, ids=str)
def test_a_bad_value_is_refused_at_construction_by_name(engine_chapter, values):
    with pytest.raises(ValueError, match=next(iter(values))):
        engine_chapter.SamplingParams(**values)


# ---- sampling through the engine


@pytest.mark.fault(7)
def test_temperature_zero_is_greedy_whatever_the_other_filters(engine, params):
    llm = engine()
    [want] = run(llm, [PROMPT], params())
    greedy = [params(top_p=0.9), params(top_p=0.1, top_k=2), params(min_p=0.5), params(top_k=-1, seed=4)]
    sampled = [params(temperature=1.5, seed=i) for i in range(4)]
    outputs = run(llm, [PROMPT] * 8, [one for pair in zip(greedy, sampled, strict=True) for one in pair])
    for output in outputs[::2]:
        assert output.token_ids == want.token_ids
    assert_greedy(cached_tiny_model("llama"), PROMPT, want.token_ids)


def test_seeds_reproduce_and_differ(engine, params):
    def sampled(llm, seeds):
        return [o.token_ids for o in run(llm, [PROMPT] * len(seeds), [params(temperature=1.0, seed=s) for s in seeds])]

    seeds = [0, 1, -1, 2**63 - 1, 0]
    first, again, other_engine = sampled(engine(), seeds), sampled(engine(), seeds[::-1])[::-1], engine(seed=9)
    assert first == again == sampled(other_engine, seeds)
    assert first[0] == first[4]
    assert len({tuple(ids) for ids in first}) == 4


def test_a_sample_does_not_depend_on_batch_mates(engine, params):
    llm = engine()
    mine = params(temperature=1.0, seed=5, repetition_penalty=1.2, frequency_penalty=0.3)
    [alone] = run(llm, [PROMPT], mine)
    mates = [params(temperature=2.0, max_tokens=n) for n in (1, 9, 20)]
    outputs = run(llm, [OTHER, [3] * 30, PROMPT, [8] * 11], [*mates[:2], mine, mates[2]])
    assert outputs[2].token_ids == alone.token_ids


def test_unseeded_requests_differ_but_the_engine_seed_reproduces_them(engine, params):
    def unseeded(**options):
        return [o.token_ids for o in run(engine(**options), [PROMPT] * 4, params(temperature=1.0))]

    first, again, other = unseeded(), unseeded(), unseeded(seed=1)
    assert len({tuple(ids) for ids in [*first, *other]}) == 8
    assert first == again


def test_penalties_reach_the_sampler(engine, params):
    """This model repeats itself; frequency and presence penalties of 2 make each output token rarer."""
    llm = engine()
    [free] = run(llm, [[5] * 200], params(max_tokens=40))
    [other] = run(llm, [[5] * 200], params(max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0))
    assert len(set(other.token_ids)) > len(set(free.token_ids))
    [banned] = run(llm, [[5] * 200], params(max_tokens=40, repetition_penalty=100.0))
    assert len(set(banned.token_ids)) == 40 and 5 not in banned.token_ids


EXTREME = [
    {"repetition_penalty": 1e-300, "temperature": 1.0},
    {"repetition_penalty": 100.0, "temperature": 1e-12},
    {"temperature": 1e-300, "top_p": 1e-12, "min_p": 1.0},
    {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1e-300},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "temperature": 1e-6},
    {"seed": -(2**63), "temperature": 1.0, "logprobs": 20},
]


@pytest.mark.fault(19)
@pytest.mark.parametrize("values", EXTREME, ids=str)
def test_no_valid_value_can_break_the_engine(engine, params, values):
    llm = engine()
    outputs = run(llm, [PROMPT, OTHER], [params(**values), params()])
    assert len(outputs[0].token_ids) == 12
    assert all(0 <= token < 1003 for token in outputs[0].token_ids)
    assert_greedy(cached_tiny_model("llama"), OTHER, outputs[1].token_ids)


# ---- log-probabilities


@pytest.mark.parametrize("values", [{}, {"temperature": 0.7, "top_k": 3, "seed": 1}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_transformers(engine, params, values, top):
    llm = engine()
    output, plain = run(llm, [PROMPT, PROMPT], [params(logprobs=top, **values), params(**values)])
    assert plain.logprobs is None and plain.token_ids == output.token_ids
    logits = hf_logits(cached_tiny_model("llama"), [*PROMPT, *output.token_ids[:-1]])[len(PROMPT) - 1 :]
    want = logits.log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids)
    for at, (token, detail) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert set(detail) == {"token_id", "logprob", "top"} and detail["token_id"] == token
        assert detail["logprob"] == pytest.approx(want[at, token].item(), abs=1e-3)
        assert len(detail["top"]) == top
        best = want[at].topk(top).values.tolist()
        assert list(detail["top"].values()) == pytest.approx(best, abs=1e-3)
        for other, value in detail["top"].items():
            assert value == pytest.approx(want[at, other].item(), abs=1e-3)


def test_logprobs_include_the_token_that_ends_the_request(engine, params):
    llm = engine()
    [free] = run(llm, [PROMPT], params())
    token = free.token_ids[first_new(free.token_ids)]
    [output] = run(llm, [PROMPT], params(stop_token_ids=[token], logprobs=1))
    assert [detail["token_id"] for detail in output.logprobs] == output.token_ids
    assert output.token_ids[-1] == token
