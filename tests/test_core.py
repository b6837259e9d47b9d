"""The engine's vocabulary: what a request may ask for, which states it passes through, what crosses its boundary."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.copies import copies

HUGE = 10**5000  # an integer without a decimal form: printing it raises
LONE = "\ud800"  # half a surrogate pair: no text, cannot be encoded
NOT_INTEGERS = (True, False, 1.0, 0.5, math.nan, math.inf, "1", "", [1], (1,), {}, b"1", 1j, HUGE, -HUGE)
NOT_NUMBERS = (True, False, math.nan, math.inf, -math.inf, "0.5", "", [0.5], {}, b"1", 1j, HUGE, -HUGE, 1e308, -1e308)

BAD = {
    "max_tokens": (*NOT_INTEGERS, 0, -1, 2**31),
    "temperature": (*NOT_NUMBERS, None, -0.001, 100.1),
    "top_k": (*NOT_INTEGERS, None, -2, 2**31),
    "top_p": (*NOT_NUMBERS, None, 0, 0.0, -0.1, 1.0000001, 2),
    "min_p": (*NOT_NUMBERS, None, -0.1, 1.0000001),
    "repetition_penalty": (*NOT_NUMBERS, None, 0, 0.0, -1.0, 100.1),
    "presence_penalty": (*NOT_NUMBERS, None, -2.001, 2.001),
    "frequency_penalty": (*NOT_NUMBERS, None, -2.001, 2.001),
    "stop": ("", [""], ["a", ""], [None], [1], 1, 0, True, b"a", [b"a"], {"a"}, {"a": 1}, LONE, ["a", "b" + LONE]),
    "stop_token_ids": (1, "1", b"1", [-1], [True], [1.0], ["1"], [None], [2**31], [HUGE], {1}, {1: 2}, [[1]]),
    "seed": (*NOT_INTEGERS, 2**63, -(2**63) - 1),
    "ignore_eos": (0, 1, None, "true", "", []),
    "logprobs": (*NOT_INTEGERS, -1, 21),
}
GOOD = {
    "max_tokens": (None, 1, 2**31 - 1),
    "temperature": (0, 0.0, 1, 1e-300, 100, 100.0),
    "top_k": (-1, 0, 1, 2**31 - 1),
    "top_p": (1, 1.0, 0.5, 5e-324),
    "min_p": (0, 0.0, 1, 1.0),
    "repetition_penalty": (1, 1e-6, 100.0),
    "presence_penalty": (-2, 0, 2.0),
    "frequency_penalty": (-2.0, 0, 2),
    "seed": (None, 0, -1, 2**63 - 1, -(2**63)),
    "ignore_eos": (True, False),
    "logprobs": (None, 0, 1, 20),
}


@pytest.fixture(params=copies("core.py"))
def core(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"{request.param}.core")


# ---- SamplingParams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_refused_at_construction_by_the_name_of_its_field(core: Any, field: str) -> None:
    for value in BAD[field]:
        with pytest.raises(ValueError) as caught:
            core.SamplingParams(**{field: value})
            pytest.fail(f"{field}={value!r} was accepted")
        said = str(caught.value)
        assert re.match(rf"{field} (must|holds) ", said), said
        assert len(said) < 300
        assert said.isprintable(), "one line that a terminal can show"


def test_every_field_has_bad_values_in_this_test(core: Any) -> None:
    assert set(BAD) == {f.name for f in dataclasses.fields(core.SamplingParams)}


@pytest.mark.parametrize("field", GOOD)
def test_the_edges_of_a_range_are_inside(core: Any, field: str) -> None:
    for value in GOOD[field]:
        assert getattr(core.SamplingParams(**{field: value}), field) == value


def test_stop_strings_and_ids_are_kept_as_tuples(core: Any) -> None:
    for given, kept in (("ab", ("ab",)), (["a", "b"], ("a", "b")), (("停", "😀"), ("停", "😀")), ([], ()), (None, ())):
        assert core.SamplingParams(stop=given).stop == kept
    for given, kept in (([0, 2**31 - 1], (0, 2**31 - 1)), ((5,), (5,)), (range(3), (0, 1, 2)), ((), ()), (None, ())):
        assert core.SamplingParams(stop_token_ids=given).stop_token_ids == kept


def test_an_error_message_does_not_repeat_a_megabyte(core: Any) -> None:
    for bad in ({"stop": ["x" * 10**6, ""]}, {"stop_token_ids": "1" * 10**6}, {"temperature": "9" * 10**6}):
        with pytest.raises(ValueError, match="must be") as caught:
            core.SamplingParams(**bad)
        assert len(str(caught.value)) < 300


def test_defaults_are_greedy_and_filter_nothing(core: Any) -> None:
    p = core.SamplingParams()
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p) == (None, 0.0, 0, 1.0, 0.0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (p.stop, p.stop_token_ids, p.seed, p.ignore_eos, p.logprobs) == ((), (), None, False, None)


def test_an_unknown_field_is_refused(core: Any) -> None:
    with pytest.raises(TypeError, match="temprature"):
        core.SamplingParams(temprature=1.0)


@pytest.mark.fault(12)
def test_params_are_immutable_and_share_nothing_with_the_caller(core: Any) -> None:
    stop, ids = ["a"], [1]
    p = core.SamplingParams(stop=stop, stop_token_ids=ids, max_tokens=3)
    stop.append("b")
    ids.append(2)
    assert (p.stop, p.stop_token_ids) == (("a",), (1,))
    for f in dataclasses.fields(p):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(p, f.name, getattr(p, f.name))
    with pytest.raises((AttributeError, TypeError)):
        p.extra = 1
    hash(p)


def test_params_survive_copy_and_pickle_and_replace_checks_again(core: Any) -> None:
    p = core.SamplingParams(max_tokens=3, temperature=0.5, stop=("停", "😀"), stop_token_ids=(7,), seed=-1, logprobs=2)
    assert copy.deepcopy(p) == p
    assert pickle.loads(pickle.dumps(p)) == p
    assert dataclasses.replace(p, top_k=5).stop == p.stop
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(p, top_p=0.0)


# ---- states ---------------------------------------------------------------------------------------------------------

LEGAL = {
    "WAITING": {"PREFILL", "ABORTED"},
    "PREFILL": {"DECODE", "FINISHED", "ABORTED", "WAITING"},
    "DECODE": {"FINISHED", "ABORTED", "WAITING"},
    "FINISHED": set(),
    "ABORTED": set(),
}


@pytest.fixture
def req(core: Any) -> Callable[..., Any]:
    def make(rid: int = 7, **fields: Any) -> Any:
        return core.Req(rid, [1, 2, 3], prompt_len=3, params=core.SamplingParams(), max_tokens=4, **fields)

    return make


def test_the_table_holds_exactly_the_legal_transitions(core: Any) -> None:
    assert {a.name: {b.name for b in after} for a, after in core.TRANSITIONS.items()} == LEGAL
    assert {state.name for state in core.ReqState} == set(LEGAL)


def test_every_legal_transition_happens_and_every_other_raises(core: Any, req: Callable[..., Any]) -> None:
    for a in core.ReqState:
        for b in core.ReqState:
            r = req(state=a)
            if b.name in LEGAL[a.name]:
                r.to(b)
                assert r.state is b
            else:
                with pytest.raises(RuntimeError, match=rf"request 7: illegal transition {a.name} -> {b.name}"):
                    r.to(b)
                assert r.state is a


def test_no_state_leaves_itself_for_itself_and_the_final_ones_are_final(core: Any) -> None:
    assert all(state not in after for state, after in core.TRANSITIONS.items())
    assert not core.TRANSITIONS[core.ReqState.FINISHED]
    assert not core.TRANSITIONS[core.ReqState.ABORTED]


@pytest.mark.fault(14)
def test_preemption_keeps_tokens_what_was_sent_and_the_first_start(core: Any, req: Callable[..., Any]) -> None:
    r, state = req(), core.ReqState
    assert r.scheduled_at == 0.0
    r.to(state.PREFILL)
    first = r.scheduled_at
    assert first > 0
    r.token_ids.append(9)
    r.sent_len = 4
    r.to(state.DECODE)
    r.to(state.WAITING)
    r.to(state.PREFILL)
    assert (r.token_ids, r.sent_len, r.prompt_len, r.scheduled_at) == ([1, 2, 3, 9], 4, 3, first)


# ---- requests and batches -------------------------------------------------------------------------------------------


def test_the_lengths_of_a_request_are_derived(req: Callable[..., Any]) -> None:
    r = req()
    assert (r.length, r.output_len, r.sent_len, r.cached_len) == (3, 0, 3, 0), "the prompt counts as sent"
    r.token_ids += [4, 5]
    assert (r.length, r.output_len, r.sent_len) == (5, 2, 3)


def test_two_requests_are_never_equal_even_if_their_content_is(req: Callable[..., Any]) -> None:
    a, b = req(), req()
    assert a != b
    assert [b, a].index(a) == 1


def test_a_part_of_a_step_samples_when_it_reaches_the_last_token(core: Any, req: Callable[..., Any]) -> None:
    r = req()
    assert [core.ScheduledReq(r, n).samples for n in (1, 2, 3)] == [False, False, True]
    r.cached_len = 2
    assert core.ScheduledReq(r, 1).samples


def test_the_phase_of_a_batch_is_that_of_its_requests_or_mixed(core: Any, req: Callable[..., Any]) -> None:
    def phase(*states: str) -> str:
        return core.Batch([core.ScheduledReq(req(state=core.ReqState[s]), 1) for s in states]).phase

    assert phase("PREFILL") == phase("PREFILL", "PREFILL") == "prefill"
    assert phase("DECODE") == phase("DECODE", "DECODE", "DECODE") == "decode"
    assert phase("PREFILL", "DECODE") == phase("DECODE", "PREFILL", "DECODE") == "mixed"


def test_the_tokens_of_a_batch_are_the_sum_of_its_parts(core: Any, req: Callable[..., Any]) -> None:
    assert core.Batch([core.ScheduledReq(req(), n) for n in (3, 1, 2)]).tokens == 6


# ---- the door -------------------------------------------------------------------------------------------------------


def test_what_fits_is_let_in_with_its_number_of_tokens(core: Any) -> None:
    limits, params = core.Limits(max_model_len=10, vocab_size=50), core.SamplingParams
    assert limits.check([1] * 6, params(max_tokens=4), 128) == 4, "exactly full"
    assert limits.check([0, 49], params(max_tokens=1), None) == 1
    assert limits.check([1], params(), 5) == 5, "unset: the caller's default"
    assert limits.check([1] * 6, params(), 128) == 4, "the default is cut to the room, it was not asked for"
    assert limits.check([1] * 6, params(), None) == 4, "no default: the rest of the context"
    assert limits.check((1, 2), params(stop_token_ids=[49]), 3) == 3


@pytest.mark.fault(20)
def test_a_request_that_is_too_long_is_told_both_numbers(core: Any) -> None:
    limits = core.Limits(max_model_len=10, vocab_size=50)
    with pytest.raises(ValueError, match=r"6 tokens.*max_tokens \(5\) = 11 exceeds max_model_len 10"):
        limits.check([1] * 6, core.SamplingParams(max_tokens=5), 128)
    for n in (10, 11):
        for params in (core.SamplingParams(), core.SamplingParams(max_tokens=1)):
            with pytest.raises(ValueError, match=rf"{n} tokens.*max_model_len is 10"):
                limits.check([1] * n, params, 128)


def test_an_empty_prompt_and_ids_that_are_none_are_refused(core: Any) -> None:
    limits = core.Limits(max_model_len=10, vocab_size=50)
    with pytest.raises(ValueError, match="empty"):
        limits.check([], core.SamplingParams(), 128)
    for bad in (-1, 50, True, 1.0, "a", None, [1], HUGE, math.nan, 2**63):
        with pytest.raises(ValueError, match=r"token id .* is not an integer from 0 to 49") as caught:
            limits.check([3, bad], core.SamplingParams(), 128)
        assert len(str(caught.value)) < 300


def test_a_stop_token_outside_the_vocabulary_is_refused(core: Any) -> None:
    with pytest.raises(ValueError, match="stop_token_ids must be below the vocabulary size 50"):
        core.Limits(max_model_len=10, vocab_size=50).check([1], core.SamplingParams(stop_token_ids=[3, 50]), 128)


def test_the_door_changes_nothing(core: Any) -> None:
    ids, params = [1, 2], core.SamplingParams(max_tokens=3)
    core.Limits(max_model_len=10, vocab_size=50).check(ids, params, 128)
    assert (ids, params) == ([1, 2], core.SamplingParams(max_tokens=3))


# ---- outputs -------------------------------------------------------------------------------------------------------


def test_an_output_is_json_with_the_keys_of_the_contract(core: Any) -> None:
    out = core.RequestOutput([1, 2], [3], "中", "stop", token_times=[0.5])
    assert list(out.to_dict()) == [
        *("prompt_token_ids", "token_ids", "text", "finish_reason", "cached_tokens", "draft_tokens", "accepted_tokens"),
        *("logprobs", "timings", "error"),
    ]
    assert json.loads(json.dumps(out.to_dict())) == out.to_dict()


def test_outputs_share_no_lists(core: Any) -> None:
    a, b = core.RequestOutput([1]), core.RequestOutput([1])
    a.token_ids.append(1)
    a.timings["x"] = 1.0
    assert b.token_ids == []
    assert "x" not in b.timings
