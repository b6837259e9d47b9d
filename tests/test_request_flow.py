"""The path of a request: through every component, in order, to exactly the tokens that were asked for.

Most of it runs on the walking skeleton of ch02, whose answer is known in advance; what a copy could break is asked of
all chapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import ch02_request_flow as ch02
from ch02_request_flow.core import Batch, ReqState, ScheduledReq
from ch02_request_flow.scripted import ANSWER, ScriptedModel
from common.trace import Tracer
from tests.flow import BRIEF, EOS, Params, answer, drain, open_llm, params_of


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


# ---- the path -------------------------------------------------------------------------------------------------------


def test_a_request_passes_every_component_in_order() -> None:
    tracer = Tracer()
    with open_llm(tracer=tracer) as llm:
        llm.generate(["hello"], Params(max_tokens=2), progress=False)
    path = [(e.step, e.component, e.action, e.state) for e in tracer.events]
    assert path == [
        (0, "LLM", "submit", ""),
        (0, "Tokenizer", "encode", ""),
        (0, "Scheduler", "add", "WAITING"),
        (1, "Scheduler", "schedule", "PREFILL"),
        (1, "ModelRunner", "forward", "PREFILL"),
        (1, "Scheduler", "process", "PREFILL"),
        (1, "Detokenizer", "push", ""),
        (2, "Scheduler", "schedule", "DECODE"),
        (2, "ModelRunner", "forward", "DECODE"),
        (2, "Scheduler", "process", "DECODE"),
        (2, "Scheduler", "finish", "FINISHED"),
        (2, "Detokenizer", "push", ""),
        (2, "LLM", "output", ""),
    ]
    schedules = [e for e in tracer.events if e.action == "schedule"]
    assert [(e.cached_len, e.extend_len, e.length) for e in schedules] == [(0, 3, 3), (0, 4, 4)], "it recomputes all"


def test_the_answer_ends_with_eos_which_is_a_token_but_no_text(llm: Any) -> None:
    (out,) = llm.generate(["hello"], Params(), progress=False)
    assert out.prompt_token_ids == llm.tokenizer.encode("hello")
    assert out.token_ids == answer(llm)
    assert (out.text, out.finish_reason, out.error) == (ANSWER, "stop", None)


def test_one_prompt_has_the_same_ids_in_every_chapter(any_llm: Any) -> None:
    prompt = "请解释什么是 KV Cache？"
    (out,) = any_llm.generate([prompt], params_of(any_llm, max_tokens=1), progress=False)
    with open_llm() as skeleton:
        assert out.prompt_token_ids == skeleton.tokenizer.encode(prompt)


def test_ids_instead_of_text_give_the_same_answer(llm: Any) -> None:
    ids = llm.tokenizer.encode("hello")
    outs = llm.generate([ids, tuple(ids)], Params(max_tokens=4), progress=False)
    assert [o.token_ids for o in outs] == [answer(llm)[:4]] * 2
    assert outs[0].prompt_token_ids is not ids, "the caller's list stays the caller's"
    assert ids == llm.tokenizer.encode("hello")


def test_a_prompt_that_ends_with_the_beginning_of_the_answer_goes_on_from_there(llm: Any) -> None:
    ids = answer(llm)
    (out,) = llm.generate([ids[:5]], progress=False)
    assert out.token_ids == ids[5:]


def test_times_are_in_order_and_one_per_token(any_llm: Any) -> None:
    (out,) = any_llm.generate([[5, 6]], params_of(any_llm, max_tokens=4, ignore_eos=True), progress=False)
    t = out.timings
    assert set(t) == {"queue_s", "ttft_s", "tpot_s", "e2e_s"}
    assert 0 <= t["queue_s"] <= t["ttft_s"] <= t["e2e_s"]
    assert len(out.token_times) == len(out.token_ids) == 4
    assert out.token_times == sorted(out.token_times)
    assert t["tpot_s"] == pytest.approx((out.token_times[3] - out.token_times[0]) / 3)


# ---- exact counts and reasons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_max_tokens_is_exact(llm: Any, n: int) -> None:
    (out,) = llm.generate(["hello"], Params(max_tokens=n), progress=False)
    assert out.token_ids == answer(llm)[:n]
    assert out.finish_reason == "length"
    assert out.text == llm.tokenizer.decode(out.token_ids), "what was held back is flushed"
    prompt = len(out.prompt_token_ids)
    stats = llm.stats()
    assert stats["steps"] == n
    assert stats["prefill_tokens"] == prompt
    assert stats["decode_tokens"] == sum(prompt + i for i in range(1, n))
    assert stats["forwarded_tokens"] == stats["prefill_tokens"] + stats["decode_tokens"]


def test_max_tokens_is_exact_in_every_chapter(any_llm: Any) -> None:
    wanted = [1, 2, 5, 10]
    params = [params_of(any_llm, max_tokens=n, ignore_eos=True) for n in wanted]
    outs = any_llm.generate(["hello"] * 4, params, progress=False)
    assert [len(o.token_ids) for o in outs] == wanted
    assert {o.finish_reason for o in outs} == {"length"}
    assert [o.text for o in outs] == [any_llm.tokenizer.decode(o.token_ids) for o in outs]


def test_the_last_allowed_token_that_is_eos_is_a_stop(llm: Any) -> None:
    n = len(answer(llm))
    (out,) = llm.generate(["hello"], Params(max_tokens=n), progress=False)
    assert (out.token_ids, out.finish_reason) == (answer(llm), "stop")


def test_ignore_eos_goes_on_to_exactly_max_tokens(llm: Any) -> None:
    n = len(answer(llm)) + 3
    (out,) = llm.generate(["hello"], Params(max_tokens=n, ignore_eos=True), progress=False)
    assert (len(out.token_ids), out.finish_reason) == (n, "length")
    assert EOS in out.token_ids[:-1]
    assert "<|im_end|>" not in out.text


def test_unset_max_tokens_is_128_or_what_the_context_leaves(llm: Any) -> None:
    (out,) = llm.generate(["hello"], Params(ignore_eos=True), progress=False)
    assert len(out.token_ids) == 128
    with open_llm(max_model_len=20) as short:
        (out,) = short.generate(["hello"], Params(ignore_eos=True), progress=False)
        assert len(out.prompt_token_ids) + len(out.token_ids) == 20


def test_a_request_may_fill_the_context_exactly(any_chapter: ModuleType) -> None:
    with open_llm(any_chapter, max_model_len=8) as llm:
        params = [params_of(llm, max_tokens=n, ignore_eos=True) for n in (3, 1, 4)]
        outs = llm.generate([[5] * 5, [6] * 7, [7] * 5], params, progress=False)
        assert [o.finish_reason for o in outs] == ["length", "length", "error"]
        assert [len(o.token_ids) for o in outs] == [3, 1, 0]
        assert "9 exceeds max_model_len 8" in outs[2].error


def test_a_stop_string_ends_the_answer_where_it_begins(llm: Any) -> None:
    for stop in ("takes", "request takes this", ", s", "E", "."):
        (out,) = llm.generate(["hello"], Params(stop=[stop, "never"]), progress=False)
        assert out.text == ANSWER[: ANSWER.index(stop)]
        assert out.finish_reason == "stop"
        assert out.token_ids == answer(llm)[: len(out.token_ids)]
        assert stop in llm.tokenizer.decode(out.token_ids)
        assert stop not in llm.tokenizer.decode(out.token_ids[:-1]), "nothing after the token that completes it"


def test_a_stop_string_that_only_begins_is_part_of_the_text(llm: Any) -> None:
    (out,) = llm.generate(["hello"], Params(stop="runner, detokenizer.!"), progress=False)
    assert (out.text, out.finish_reason) == (ANSWER, "stop")
    (out,) = llm.generate(["hello"], Params(stop="Every request fails", max_tokens=4), progress=False)
    assert (out.text, out.finish_reason) == (llm.tokenizer.decode(answer(llm)[:4]), "length")


def test_an_eos_that_is_a_word_of_the_vocabulary_is_no_text(any_llm: Any) -> None:
    """Models name ordinary tokens as EOS too; both kinds of ending leave the token in token_ids and out of text."""
    free = params_of(any_llm, max_tokens=6, ignore_eos=True)
    (whole,) = any_llm.generate([[5, 6]], free, progress=False)
    word = next(i for i, t in enumerate(whole.token_ids) if t not in whole.token_ids[:i] and i >= 2)
    any_llm.engine.scheduler.eos_ids = frozenset({whole.token_ids[word]})
    (out,) = any_llm.generate([[5, 6]], params_of(any_llm, max_tokens=6), progress=False)
    assert out.token_ids == whole.token_ids[: word + 1]
    assert out.text == any_llm.tokenizer.decode(out.token_ids[:-1])
    assert out.finish_reason == "stop"


# ---- order ----------------------------------------------------------------------------------------------------------


def test_requests_run_one_by_one_in_the_order_of_arrival(llm: Any) -> None:
    lengths = [3, 1, 2]
    for n in lengths:
        llm.add([10 + n], Params(max_tokens=n))
    assert (llm.stats()["waiting"], llm.stats()["running"]) == (3, 0), "nothing happens before a step"
    finished = []
    while llm.has_work():
        finished += [o.prompt_token_ids for o in llm.step()]
        assert llm.stats()["running"] <= 1
    assert finished == [[10 + n] for n in lengths]
    assert llm.stats()["steps"] == sum(lengths)


def test_answers_come_in_the_order_of_the_prompts(any_llm: Any) -> None:
    params = [params_of(any_llm, max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    outs = any_llm.generate([[5], [6], [7]], params, progress=False)
    assert [o.prompt_token_ids for o in outs] == [[5], [6], [7]]
    assert [len(o.token_ids) for o in outs] == [5, 1, 3]


def test_one_params_object_serves_many_requests_unchanged(any_llm: Any) -> None:
    params = params_of(any_llm, max_tokens=2, stop=["§"], ignore_eos=True)
    same = params_of(any_llm, max_tokens=2, stop=["§"], ignore_eos=True)
    for _ in range(2):
        outs = any_llm.generate([[5], [5, 6, 7]], params, progress=False)
        assert [len(o.token_ids) for o in outs] == [2, 2]
    assert params == same


def test_generate_leaves_requests_of_add_to_step(any_llm: Any) -> None:
    brief, longer = (params_of(any_llm, max_tokens=n, ignore_eos=True) for n in (1, 6))
    any_llm.add([9], brief)
    any_llm.add([], brief)
    outs = any_llm.generate([[5], [6]], longer, progress=False)
    assert [o.prompt_token_ids for o in outs] == [[5], [6]]
    any_llm.add([8], brief)
    rest = drain(any_llm)
    assert sorted((o.prompt_token_ids, o.finish_reason) for o in rest) == [
        ([], "error"),
        ([8], "length"),
        ([9], "length"),
    ]
    assert any_llm.step() == []


def test_no_prompts_no_answers(llm: Any) -> None:
    assert llm.generate([], progress=False) == []
    assert llm.step() == []
    assert not llm.has_work()


# ---- abort ----------------------------------------------------------------------------------------------------------


def test_abort_takes_effect_at_a_step_boundary_in_every_state(any_llm: Any) -> None:
    params = params_of(any_llm, max_tokens=50, ignore_eos=True)
    decoding, waiting = any_llm.add([5], params), any_llm.add([6], params)
    any_llm.step()
    for _ in range(3):  # idempotent
        any_llm.abort(decoding)
        any_llm.abort(waiting)
    outs = {o.prompt_token_ids[0]: o for o in any_llm.step()}
    assert {o.finish_reason for o in outs.values()} == {"abort"}
    assert len(outs[5].token_ids) == 1
    assert outs[5].text == any_llm.tokenizer.decode(outs[5].token_ids)
    for over in (decoding, waiting, 10**9, -1):  # aborted, or never known
        any_llm.abort(over)
    assert not any_llm.has_work()
    assert any_llm.step() == []
    assert any_llm.stats()["running"] == any_llm.stats()["waiting"] == 0


def test_aborting_what_has_finished_or_was_refused_changes_nothing(any_llm: Any) -> None:
    done = any_llm.add([5], params_of(any_llm, max_tokens=1, ignore_eos=True))
    refused = any_llm.add([])
    (bad, good) = drain(any_llm)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    again = any_llm.add([])
    for rid in (done, refused, again):
        any_llm.abort(rid)
    assert [o.finish_reason for o in drain(any_llm)] == ["error"]


def test_an_abort_leaves_the_others_their_turn(llm: Any) -> None:
    rids = [llm.add([10 + i], BRIEF) for i in range(4)]
    llm.step()
    llm.abort(rids[0])
    llm.abort(rids[2])
    outs = drain(llm)
    assert [(o.prompt_token_ids[0], o.finish_reason) for o in outs] == [
        *((10, "abort"), (12, "abort"), (11, "length"), (13, "length"))
    ]


def test_an_aborted_answer_keeps_the_text_that_was_held_back(llm: Any) -> None:
    rid = llm.add("hello", Params(stop="Every request sleeps"))
    for _ in range(3):
        llm.step()
    llm.abort(rid)
    (out,) = llm.step()
    assert out.text == llm.tokenizer.decode(answer(llm)[:3])


def test_a_request_whose_prompt_is_half_computed_can_be_aborted(llm: Any) -> None:
    """No forward of this engine is partial, so the scheduler is asked directly: a chunk gives no token."""
    scheduler = llm.engine.scheduler
    llm.add([5, 6, 7], BRIEF)
    batch = scheduler.schedule()
    assert batch.phase == "prefill"
    assert scheduler.process(batch, [[]]) == []
    assert scheduler.running[0].state is ReqState.PREFILL
    out = scheduler.abort(scheduler.running[0].rid)
    assert (out.ids, out.finish.reason) == ([], "abort")
    assert scheduler.abort(out.rid) is None
    scheduler.check()


# ---- tensors --------------------------------------------------------------------------------------------------------


def request(rid: int, ids: list[int], cached: int = 0) -> Any:
    return ch02.core.Req(rid, ids, len(ids), BRIEF, 3, cached_len=cached)


def test_a_batch_becomes_flat_tensors_without_padding(llm: Any) -> None:
    parts = [(request(0, [5, 6, 7]), 3), (request(1, [8, 9, 10, 11], cached=2), 1), (request(2, [12, 13], cached=1), 1)]
    inp = llm.engine.runner.prepare(Batch([ScheduledReq(r, n) for r, n in parts]))
    assert inp.ids.tolist() == [5, 6, 7, 10, 13]
    assert inp.positions.tolist() == [0, 1, 2, 2, 1]
    assert inp.cu_extend.tolist() == [0, 3, 4, 5]
    assert inp.seq_lens.tolist() == [3, 3, 2]
    assert inp.logit_rows.tolist() == [2, 4], "the second part does not reach its last token: no logits"
    assert (inp.ids.dtype, inp.positions.dtype, inp.logit_rows.dtype) == (torch.int64,) * 3
    assert (inp.cu_extend.dtype, inp.seq_lens.dtype) == (torch.int32,) * 2


def test_the_scripted_model_looks_at_each_request_alone(llm: Any) -> None:
    ids = answer(llm)
    batch = Batch([ScheduledReq(request(0, ids[:2]), 2), ScheduledReq(request(1, [5]), 1)])
    logits = llm.engine.runner.run(batch)
    assert logits.shape == (2, 1003)
    assert logits.dtype == torch.float32
    assert logits.argmax(-1).tolist() == [ids[2], ids[0]]


def test_the_scripted_answer_repeats_its_tokens_without_losing_its_place() -> None:
    model = ScriptedModel([1, 1, 2, 1, 1, 3], eos_id=9, vocab_size=10)
    ids = [7]
    for _ in range(7):
        ids.append(model.next_token(ids))
    assert ids == [7, 1, 1, 2, 1, 1, 3, 9]
