"""What is refused, how it is said, and that neither a refusal nor an interruption harms anybody else."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.flow import BRIEF, MODEL, Params, drain, open_llm, params_of


@pytest.fixture
def llm() -> Iterator[Any]:
    """The skeleton."""
    with open_llm() as made:
        yield made


@pytest.fixture
def any_llm(any_chapter: ModuleType) -> Iterator[Any]:
    """Every chapter's engine in turn."""
    with open_llm(any_chapter) as made:
        yield made


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.fault(19)
def test_bad_prompts_are_answered_with_an_error_and_the_others_run(any_llm: Any) -> None:
    bad: list[Any] = [
        "",
        [],
        [-1],
        [1003],
        [1.5],
        [True],
        [None],
        ["a"],
        5,
        None,
        b"abc",
        {"a": 1},
        "\ud800",
        [5] * 512,
    ]
    outs = any_llm.generate(["hello", *bad, "hello"], params_of(any_llm, max_tokens=2, ignore_eos=True), progress=False)
    assert [o.finish_reason for o in outs] == ["length", *["error"] * len(bad), "length"]
    for out in outs[1:-1]:
        assert (out.token_ids, out.text, out.logprobs) == ([], "", None)
        assert out.error
        assert out.error.isprintable()
        assert len(out.error) < 300
        assert set(out.timings) == {"queue_s", "ttft_s", "tpot_s", "e2e_s"}
    assert outs[0].token_ids == outs[-1].token_ids
    assert outs[0].error is None
    assert any_llm.stats()["running"] == any_llm.stats()["waiting"] == 0


def test_a_too_long_prompt_is_told_both_numbers(llm: Any) -> None:
    (out,) = llm.generate([[5] * 600], BRIEF, progress=False)
    assert "600" in out.error
    assert "512" in out.error


def test_the_output_of_a_refused_request_is_json_too(llm: Any) -> None:
    (out,) = llm.generate([[math.nan]], BRIEF, progress=False)
    json.dumps(out.to_dict())


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"seed": 0}),
        *({"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"stop_token_ids": [5]}, {"logprobs": 0}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_skeleton_refuses_what_needs_probabilities_by_name(llm: Any, fields: dict[str, Any]) -> None:
    (out,) = llm.generate(["hello"], Params(**fields), progress=False)
    assert out.finish_reason == "error"
    assert out.error.startswith(f"{next(iter(fields))} is not supported")


def test_the_skeleton_takes_what_asks_for_nothing(llm: Any) -> None:
    (out,) = llm.generate(["hello"], Params(max_tokens=1, top_k=-1, temperature=0, top_p=1.0), progress=False)
    assert out.error is None


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("hello"),
        lambda llm: llm.generate([5, 6, 7]),
        lambda llm: llm.generate(["a", "b"], [BRIEF]),
        lambda llm: llm.generate(["a"], []),
        lambda llm: llm.generate(["a", "b"], {"max_tokens": 3, "top_k": 1}),
        lambda llm: llm.generate(["a", "b"], [BRIEF, {"max_tokens": 3}]),
        lambda llm: llm.add("a", {"max_tokens": 3}),
        *(lambda llm, bad=bad: llm.generate(bad) for bad in (None, {"a": 1}, 5, iter(["a"]), b"ab")),
    ],
)
def test_a_wrong_call_raises_and_nothing_of_it_runs(llm: Any, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"prompts|SamplingParams"):
        call(llm)
    assert llm.stats()["waiting"] == llm.stats()["running"] == 0
    assert {o.finish_reason for o in drain(llm)} <= {"abort"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"treads": 1}, "unknown option 'treads'"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be one of"),
        ({"threads": -1}, "threads must be"),
        ({"threads": "2"}, "threads must be"),
        ({"threads": True}, "threads must be"),
        ({"seed": 0.5}, "seed must be"),
        ({"seed": None}, "seed must be"),
        ({"max_model_len": 1}, "max_model_len must be"),
        ({"max_model_len": -5}, "max_model_len must be"),
        ({"max_model_len": 16.0}, "max_model_len must be"),
        ({"max_model_len": 513}, "max_model_len 513 exceeds .* 512"),
        ({"debug_invariants": "no"}, "debug_invariants must be"),
        ({"model": "dummy:gpt-9"}, "dummy:gpt-9"),
        ({"model": ""}, "no model"),
    ],
)
def test_a_bad_option_is_one_clear_line(any_chapter: ModuleType, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        any_chapter.LLM(**{"model": MODEL, **options})
    assert "\n" not in str(caught.value)


# ---- invariants and interruptions -----------------------------------------------------------------------------------


def test_debug_invariants_catch_books_that_do_not_add_up(llm: Any) -> None:
    llm.add([5], BRIEF)
    llm.step()
    llm.engine.scheduler.waiting.append(llm.engine.scheduler.running[0])
    with pytest.raises(AssertionError, match="two queues"):
        llm.step()


def test_without_the_flag_nothing_is_checked() -> None:
    with open_llm(debug_invariants=False) as llm:
        llm.engine.scheduler.check = lambda: pytest.fail("checked")
        assert llm.generate([[5]], BRIEF, progress=False)[0].finish_reason == "length"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=["Ctrl-C", "a fault"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_generate_leaves_a_usable_llm(any_llm: Any, error: type[BaseException], at: int) -> None:
    params = params_of(any_llm, max_tokens=5, ignore_eos=True)
    want = any_llm.generate([[5], [6]], params, progress=False)
    pending, aborted = any_llm.add([9], params), any_llm.add([8], params)
    any_llm.add([])
    any_llm.abort(aborted)
    interrupt(any_llm.engine.runner, "run", error, at)
    with pytest.raises(error):
        any_llm.generate([[5], [6]], params, progress=False)
    again = any_llm.generate([[5], [6]], params, progress=False)
    assert [o.token_ids for o in again] == [o.token_ids for o in want]
    rest = drain(any_llm)
    others = sorted((o.prompt_token_ids, o.finish_reason) for o in rest)
    assert others == [([], "error"), ([8], "abort"), ([9], "length")], f"these ({pending} too) and nothing else"
    assert any_llm.stats()["running"] == any_llm.stats()["waiting"] == 0


def test_an_interruption_while_prompts_are_added_takes_them_back(llm: Any) -> None:
    interrupt(llm.tokenizer, "encode", KeyboardInterrupt, 2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", [], "c"], BRIEF, progress=False)
    assert not drain(llm)
    assert llm.generate(["a"], BRIEF, progress=False)[0].finish_reason == "length"


def test_ctrl_c_in_the_middle_of_a_step_loses_no_token(any_llm: Any) -> None:
    """It arrives where the step has produced its tokens and nobody has them yet."""
    params = params_of(any_llm, max_tokens=6, ignore_eos=True)
    (want,) = any_llm.generate([[9]], params, progress=False)
    any_llm.add([9], params)
    any_llm.step()
    process = any_llm.engine.scheduler.process
    signals = iter([signal.SIGINT])

    def signalled(*args: Any) -> Any:
        outs = process(*args)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        return outs

    any_llm.engine.scheduler.process = signalled
    with pytest.raises(KeyboardInterrupt):
        any_llm.generate([[5], [6]], params, progress=False)
    found = []
    for _ in range(50):
        if any_llm.has_work():
            found += any_llm.step()
    assert not any_llm.has_work(), "nothing is waited for that never comes"
    assert [o.token_ids for o in found] == [want.token_ids]


def test_a_closed_llm_answers_nothing() -> None:
    llm = open_llm()
    llm.add([5], BRIEF)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[5]], BRIEF, progress=False), lambda: llm.add([5]), llm.step):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()
    llm.abort(0)
    assert llm.stats()["steps"] == 0


def interrupt(owner: Any, name: str, error: type[BaseException], at: int) -> None:
    """Let the at-th call from here on raise once."""
    call, calls = getattr(owner, name), iter(range(1, 10**6))

    def once(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error("interrupted")
        return call(*args, **kwargs)

    setattr(owner, name, once)
