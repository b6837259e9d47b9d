"""Speculation over HTTP and over several ranks: texts, usage and metrics are right, and only rank 0 guesses."""

from __future__ import annotations

from typing import Any

import pytest

from common.service import Server
from common.tiny import cached_tiny_model
from tests.conftest import chapter
from tests.engine_runs import engines_of, params_of, run
from tests.prompts import PROMPTS
from tests.serving import Served, running, texts, tiny_folder
from tests.speculation import SPECULATIVE
from tests.test_parity import compared

LOOP = "one two one two one two one two"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(params=SPECULATIVE)
def module(request):
    """Every chapter that speculates, in turn."""
    return chapter(request.param)


@pytest.fixture(scope="module", params=SPECULATIVE)
def guessing(request):
    """A server whose tiny model guesses for itself, so that all guesses are right."""
    yield from running(request.param, "--speculative", "draft", "--draft-model", str(tiny_folder()))


def details(answer: dict[str, Any]) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_usage_tells_what_was_accepted_and_rejected(guessing: Served) -> None:
    want = guessing.offline(LOOP, max_tokens=40, temperature=0.0, ignore_eos=True)
    before = guessing.metrics()
    answer = guessing.good(prompt=LOOP, max_tokens=40, **GREEDY)
    assert answer["choices"][0]["text"] == want.text
    accepted, rejected = details(answer)
    assert accepted > 25 and rejected == 0 and answer["usage"]["completion_tokens"] == 40
    guessing.at_rest()
    after = guessing.metrics()
    assert after["minisgl_accepted_tokens_total"] - before["minisgl_accepted_tokens_total"] == accepted
    assert after["minisgl_draft_tokens_total"] - before["minisgl_draft_tokens_total"] == accepted + rejected


def test_a_stream_carries_runs_of_tokens_and_the_same_usage(guessing: Served) -> None:
    body = {"prompt": LOOP, "max_tokens": 40, **GREEDY}
    events = guessing.events(**body, stream_options={"include_usage": True})
    whole = guessing.good(**body)
    assert texts(events) == [whole["choices"][0]["text"]]
    assert events[-1]["usage"]["completion_tokens"] == 40
    assert details(events[-1]) == details(whole)
    assert len(events) < 30, "several tokens come in one event"


def test_choices_add_up_and_a_stop_inside_a_run_ends_the_text(guessing: Served) -> None:
    two = guessing.good(prompt=LOOP, max_tokens=20, n=2, temperature=0.8, seed=4, ignore_eos=True)
    assert two["usage"]["completion_tokens"] == 40 and sum(details(two)) > 0
    text = guessing.good(prompt=LOOP, max_tokens=40, **GREEDY)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:4]
    answer = guessing.good(prompt=LOOP, max_tokens=40, stop=stop, **GREEDY)
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", SPECULATIVE)
def test_without_speculation_both_are_zero(name: str, tmp_path) -> None:
    with Server(name, "--model", str(tiny_folder()), "--dtype", "float32", "--threads", "1") as server:
        served = Served(name, server.url, {})
        assert details(served.good(prompt=LOOP, max_tokens=9, **GREEDY)) == (0, 0)
        served.close()


# ---- several ranks


@pytest.fixture
def engine(module):
    yield from engines_of(module)


def test_two_ranks_guess_as_one_does(module, engine) -> None:
    params = params_of(module)(max_tokens=40)
    prompts = [[5, 6, 5, 6, 5, 6, 5], [9, 511, 64], [700, 33, 17, 2, 5]]
    [*want] = run(engine(), prompts, params)
    same = str(cached_tiny_model("llama"))
    for way in ({"speculative": "ngram"}, {"speculative": "draft", "draft_model": same}):
        llm = engine(tp=2, **way)
        got = run(llm, prompts, params)
        assert [o.token_ids for o in got] == [o.token_ids for o in want]
        stats = llm.stats()
        assert stats["allreduce_bytes"] == stats["forwarded_tokens"] * (2 * 3 + 1) * 64 * 4, (
            "the draft model sends nothing"
        )
        if "draft_model" in way:
            assert stats["accepted_tokens"] == stats["draft_tokens"] > 60
        llm.close()


def test_a_draft_model_that_does_not_fit_is_refused_before_ranks_start(engine) -> None:
    other = str(cached_tiny_model("llama", vocab_size=1500))
    with pytest.raises(ValueError, match="vocabulary of 1500 tokens"):
        engine(tp=2, speculative="draft", draft_model=other)


@pytest.mark.slow
def test_three_ranks_of_smollm2_guess_from_their_text(module) -> None:
    chosen = ["1, 1, 2, 3, 5, 8, 13,", "| name | age |\n|---|---|\n| Ann | 31 |\n|", "def fibonacci(n):\n    "]
    assert set(chosen) <= set(PROMPTS)
    params = module.SamplingParams(max_tokens=24, ignore_eos=True)
    with module.LLM("smollm2-135m", dtype="float32", threads=1, tp=3, max_model_len=256, speculative="ngram") as llm:
        outputs = llm.generate(chosen, params, progress=False)
        stats = llm.stats()
    assert sum(compared(tuple(o.prompt_token_ids), tuple(o.token_ids)) for o in outputs) > 60
    assert stats["accepted_tokens"] > 3 and stats["allreduce_bytes"] > 0
