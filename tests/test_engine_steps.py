"""Prompts good and bad, add, step and abort, and what an engine reports: outputs, timings, counters."""

from __future__ import annotations

import json

import pytest
import torch

from common.tiny import cached_tiny_model, tiny_model
from tests.engine_runs import OTHER, PROMPT, drain, engines_of, params_of, run
from tests.oracle import assert_greedy

STATS = {
    "forwarded_tokens", "prefill_tokens", "decode_tokens", "steps", "kv_total", "kv_used", "kv_cached",
    "prefix_hit_tokens", "preemptions", "draft_tokens", "accepted_tokens", "allreduce_bytes", "running", "waiting",
}  # fmt: skip
OUTPUT = {
    "prompt_token_ids", "token_ids", "text", "finish_reason", "cached_tokens", "draft_tokens", "accepted_tokens",
    "logprobs", "timings", "error",
}  # fmt: skip


@pytest.fixture
def params(engine_chapter):
    return params_of(engine_chapter)


@pytest.fixture
def engine(engine_chapter):
    yield from engines_of(engine_chapter)


# ---- prompts


BAD_PROMPTS = {
    "empty list": [],
    "empty string": "",
    "negative id": [5, -1],
    "id beyond the vocabulary": [5, 1003],
    "huge id": [2**70],
    "float id": [1.0],
    "boolean id": [True],
    "text among ids": [5, "a"],
    "nested": [[5]],
    "none": None,
    "number": 7,
    "bytes": b"abc",
    "lone surrogate": "a\ud800b",
    "too long": [5] * 64,
}


@pytest.mark.parametrize("what", BAD_PROMPTS)
def test_a_bad_prompt_gets_an_error_and_the_others_run(engine, params, what):
    llm = engine(max_model_len=64)
    outputs = run(llm, [PROMPT, BAD_PROMPTS[what], OTHER], params())
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == [] and outputs[1].text == ""
    assert outputs[1].error and "\n" not in outputs[1].error
    assert outputs[0].error is None and outputs[2].error is None
    for prompt, output in ((PROMPT, outputs[0]), (OTHER, outputs[2])):
        assert_greedy(cached_tiny_model("llama"), prompt, output.token_ids)
    assert not llm.has_work()


def test_a_stop_token_id_beyond_the_vocabulary_is_refused(engine, params):
    outputs = run(engine(), [PROMPT, PROMPT], [params(stop_token_ids=[1003]), params(stop_token_ids=[1002])])
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert "1003" in outputs[0].error


def test_text_and_ids_mixed(engine, params):
    llm = engine()
    text = "请解释 the KV cache 🎉"
    ids = llm.tokenizer.encode(text)
    outputs = run(llm, [text, ids, tuple(ids), range(5, 9)], params())
    assert outputs[0].prompt_token_ids == ids
    assert [output.token_ids for output in outputs[1:3]] == [outputs[0].token_ids] * 2
    assert outputs[3].prompt_token_ids == [5, 6, 7, 8]


def test_a_string_is_encoded_with_special_tokens(engine, params, tmp_path):
    from common.tiny import BOS_ID, write_tokenizer

    folder = tiny_model("llama", tmp_path / "model")
    write_tokenizer(folder, add_bos=True)
    llm = engine(folder)
    [output] = run(llm, ["hello"], params(max_tokens=1))
    assert output.prompt_token_ids[0] == BOS_ID and output.prompt_token_ids.count(BOS_ID) == 1
    chat = llm.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert BOS_ID not in chat, "the template of this model writes none"


def test_the_callers_prompt_is_neither_kept_nor_changed(engine, params):
    llm = engine()
    [want] = run(llm, [PROMPT], params())
    prompt = list(PROMPT)
    llm.add(prompt, params())
    prompt.append(3)
    [output] = drain(llm)
    assert output.token_ids == want.token_ids and output.prompt_token_ids == PROMPT
    assert prompt == [*PROMPT, 3]


def test_a_bare_prompt_in_place_of_a_list_is_refused(engine, params):
    for prompts in ("hello", [1, 2, 3]):
        with pytest.raises(ValueError, match="list of prompts"):
            run(engine(), prompts, params())


def test_as_many_params_as_prompts(engine, params):
    with pytest.raises(ValueError, match=r"2 prompts but 1 SamplingParams"):
        run(engine(), [PROMPT, OTHER], [params()])


def test_no_prompts_no_outputs(engine, params):
    assert run(engine(), [], params()) == []


# ---- step by step


def test_add_and_step_give_what_generate_gives(engine, params):
    llm = engine()
    want = run(llm, [PROMPT, OTHER, PROMPT[:2]], params())
    ids = [llm.add(prompt, params()) for prompt in (PROMPT, OTHER)]
    outputs = []
    for _ in range(3):
        outputs += llm.step()
    ids.append(llm.add(PROMPT[:2], params()))  # joins while the others run
    outputs += drain(llm)
    assert len(set(ids)) == 3
    found = {tuple(output.prompt_token_ids): output.token_ids for output in outputs}
    assert found == {tuple(output.prompt_token_ids): output.token_ids for output in want}
    assert llm.step() == [] and not llm.has_work()


def test_step_reports_each_request_once_and_only_finished_ones(engine, params):
    llm = engine()
    for wanted in (1, 3, 6):
        llm.add(PROMPT, params(max_tokens=wanted))
    outputs = drain(llm)
    assert sorted(len(output.token_ids) for output in outputs) == [1, 3, 6]
    assert all(output.finish_reason == "length" for output in outputs)


def test_a_bad_prompt_of_add_comes_from_the_next_step(engine, params):
    llm = engine()
    llm.add([], params())
    assert llm.has_work()
    [output] = llm.step()
    assert output.finish_reason == "error" and "empty" in output.error
    assert not llm.has_work()


def test_generate_leaves_requests_of_add_alone(engine, params):
    llm = engine()
    llm.add(PROMPT, params(max_tokens=3))
    llm.add(OTHER, params(max_tokens=40))
    [output] = run(llm, [PROMPT[:3]], params(max_tokens=5))
    assert output.prompt_token_ids == PROMPT[:3]
    assert [len(o.token_ids) for o in sorted(drain(llm), key=lambda o: len(o.token_ids))] == [3, 40]


def test_abort_while_waiting_before_the_first_step(engine, params):
    llm = engine()
    rid = llm.add(PROMPT, params())
    llm.abort(rid)
    [output] = drain(llm)
    assert output.finish_reason == "abort" and output.token_ids == [] and output.error is None
    assert llm.stats()["forwarded_tokens"] == 0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_abort_while_running_keeps_the_tokens_so_far(engine, params, steps):
    llm = engine()
    [want] = run(llm, [PROMPT], params(max_tokens=30))
    rid = llm.add(PROMPT, params(max_tokens=30))
    for _ in range(steps):
        assert llm.step() == []
    llm.abort(rid)
    [output] = llm.step()
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 30
    assert output.token_ids == want.token_ids[: len(output.token_ids)]
    assert not llm.has_work() and llm.stats()["running"] == 0 and llm.stats()["kv_used"] == 0


def test_abort_is_idempotent_and_unknown_or_finished_ids_are_ignored(engine, params):
    llm = engine()
    rid = llm.add(PROMPT, params(max_tokens=2))
    llm.abort(rid + 1000)
    [output] = drain(llm)
    assert output.finish_reason == "length"
    llm.abort(rid)
    assert not llm.has_work() and llm.step() == []
    rid = llm.add(PROMPT, params())
    llm.step()
    for _ in range(3):
        llm.abort(rid)
    assert [output.finish_reason for output in drain(llm)] == ["abort"]
    bad = llm.add([], params())
    llm.abort(bad)
    assert [output.finish_reason for output in drain(llm)] == ["error"]


def test_an_abort_leaves_the_others_as_they_were(engine, params):
    llm = engine()
    prompts = [PROMPT, OTHER, [9] * 20, [4, 5, 6]]
    want = run(llm, prompts, params(max_tokens=9))
    for victim in range(4):
        ids = [llm.add(prompt, params(max_tokens=9)) for prompt in prompts]
        outputs = [*llm.step(), *llm.step()]
        llm.abort(ids[victim])
        outputs += drain(llm)
        by_prompt = {tuple(output.prompt_token_ids): output for output in outputs}
        for at, prompt in enumerate(prompts):
            output = by_prompt[tuple(prompt)]
            assert output.finish_reason == ("abort" if at == victim else "length")
            if at != victim:
                assert output.token_ids == want[at].token_ids


@pytest.mark.fault(6)
def test_random_adds_steps_and_aborts_end_with_empty_books(engine, params):
    """Every request is reported exactly once; the tokens of those that ran to their end are those of a run alone."""
    llm = engine(max_model_len=96)
    prompts = [[7 + n] * (1 + 5 * n) for n in range(8)]
    want = {tuple(o.prompt_token_ids): o.token_ids for o in run(llm, prompts, params(max_tokens=8))}
    generator = torch.Generator().manual_seed(0)
    added, outputs = [], []
    for _ in range(150):
        dice = torch.randint(10, (2,), generator=generator).tolist()
        if dice[0] < 3:
            added.append(llm.add(prompts[dice[1] % 8], params(max_tokens=8)))
        elif dice[0] < 5 and added:
            llm.abort(added[-1 - dice[1] % min(4, len(added))])
        else:
            outputs += llm.step()
    outputs += drain(llm)
    assert len(outputs) == len(added)
    for output in outputs:
        full = want[tuple(output.prompt_token_ids)]
        assert output.token_ids == full[: len(output.token_ids)]
        assert output.finish_reason == "abort" or output.token_ids == full
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == stats["kv_used"] == 0


# ---- outputs, counters, options


def test_the_fields_of_an_output(engine, params):
    llm = engine(max_model_len=64)
    rid = llm.add(PROMPT, params(max_tokens=40))
    llm.step()
    llm.abort(rid)
    outputs = [*run(llm, [PROMPT, []], params(logprobs=1)), *drain(llm)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "abort"]
    for output in outputs:
        data = json.loads(json.dumps(output.to_dict()))
        assert set(data) == OUTPUT
        assert data["prompt_token_ids"] == output.prompt_token_ids and data["token_ids"] == output.token_ids
        assert data["cached_tokens"] >= 0
        assert len(output.token_times) == len(output.token_ids)
    assert outputs[0].text == llm.tokenizer.decode(outputs[0].token_ids)


def test_timings_are_in_order(engine, params):
    llm = engine()
    llm.add(PROMPT, params(max_tokens=50))
    outputs = run(llm, [PROMPT, OTHER, [5] * 100], [params(max_tokens=n) for n in (1, 2, 12)])
    for output in outputs:
        timings, times = output.timings, output.token_times
        assert set(timings) == {"queue_s", "ttft_s", "tpot_s", "e2e_s"}
        assert 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["e2e_s"] < 60
        assert times == sorted(times) and times[0] == timings["ttft_s"]
        gaps = len(times) - 1
        assert timings["tpot_s"] == pytest.approx((times[-1] - times[0]) / gaps if gaps else 0.0)


def test_stats_has_exactly_the_keys_of_the_contract(engine, params):
    llm = engine()
    fresh = llm.stats()
    assert set(fresh) == STATS
    assert all(type(value) is int for value in fresh.values())
    assert not any(fresh[name] for name in STATS - {"kv_total"}), "loading and warm-up are not counted"
    rid = llm.add(PROMPT, params(max_tokens=50))
    llm.add(OTHER, params(max_tokens=50))
    assert llm.stats()["waiting"] == 2
    llm.step()
    llm.step()
    during = llm.stats()
    assert during["running"] + during["waiting"] == 2 and during["running"] >= 1
    assert during["steps"] == 2
    llm.abort(rid)
    drain(llm)
    after = llm.stats()
    assert set(after) == STATS and all(type(value) is int for value in after.values())
    assert after["running"] == after["waiting"] == after["kv_used"] == 0
    assert after["forwarded_tokens"] == after["prefill_tokens"] + after["decode_tokens"]


def test_an_unknown_option_is_refused(engine):
    with pytest.raises(ValueError, match="no_such_option"):
        engine(no_such_option=1)


BAD_OPTIONS = [
    {"dtype": "int8"}, {"device": "tpu"}, {"threads": -1}, {"max_model_len": -1}, {"max_model_len": 1}, {"native": "on"},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_by_name(engine, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        engine(**options)


@pytest.mark.parametrize("debug", [True, False])
def test_debug_invariants_are_checked_after_every_step(engine, params, debug, monkeypatch):
    llm = engine(debug_invariants=debug)
    scheduler, calls = llm.engine.scheduler, []
    monkeypatch.setattr(scheduler, "check", lambda check=scheduler.check: calls.append(check()))
    run(llm, [PROMPT, OTHER], params())
    assert len(calls) == (llm.stats()["steps"] if debug else 0)


def test_the_invariants_notice_a_request_in_two_queues(engine, params):
    llm = engine()
    llm.add(PROMPT, params())
    llm.step()
    llm.engine.scheduler.check()
    llm.engine.scheduler.waiting.append(llm.engine.scheduler.running[0])
    with pytest.raises(AssertionError):
        llm.engine.scheduler.check()


def test_with_closes_the_engine(engine_chapter, monkeypatch):
    closed = []
    monkeypatch.setattr(engine_chapter.LLM, "close", lambda self: closed.append(self))
    with engine_chapter.LLM(str(cached_tiny_model("llama")), dtype="float32", threads=1) as llm:
        assert isinstance(llm, engine_chapter.LLM) and not closed
    assert closed == [llm]
    with (
        pytest.raises(KeyError),
        engine_chapter.LLM(str(cached_tiny_model("llama")), dtype="float32", threads=1) as second,
    ):
        raise KeyError
    assert closed == [llm, second]


def test_close_twice_does_no_harm(engine):
    llm = engine()
    llm.close()
    llm.close()
