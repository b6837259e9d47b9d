"""What a client of OpenAI's API may rely on: every answer is that of the engine, streamed or not, and is described truly."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from common.service import Server
from tests.oracle import hf_logits
from tests.serving import (
    FRONTS,
    MAX_MODEL_LEN,
    Served,
    reasons,
    texts,
    tiny_folder,
)

PROMPT = "the cat is 请解释什么是"
USER = [{"role": "user", "content": "the cat"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=FRONTS)
def smollm2(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of the real model, for what needs sensible text."""
    flags = ["--model", "smollm2-135m", "--dtype", "float32", "--threads", "1"]
    with Server(request.param, *flags) as server:
        served = Served(request.param, server.url)
        yield served
        served.close()


# ---- the openai client ----------------------------------------------------------------------------------------------


def test_the_models_are_listed_and_found(served: Served) -> None:
    assert [model.id for model in served.ai.models.list()] == ["tiny"]
    assert served.ai.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="other"):
        served.ai.models.retrieve("other")


@pytest.mark.fault(28)
def test_a_completion_is_the_answer_of_the_engine(served: Served) -> None:
    answer = served.ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, extra_body=GREEDY)
    want = served.offline(PROMPT, max_tokens=24, ignore_eos=True)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index, choice.logprobs) == ("text_completion", "tiny", 0, None)
    assert (choice.text, choice.finish_reason) == (want.text, "length")
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (len(want.prompt_token_ids), 24, len(want.prompt_token_ids) + 24)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.id.startswith("cmpl-")


def test_a_chat_is_the_answer_of_the_engine(served: Served) -> None:
    answer = served.ai.chat.completions.create(model="tiny", messages=USER, max_tokens=24, extra_body=GREEDY)
    tokenizer = importlib.import_module(f"{served.chapter}.tokenizer").Tokenizer(tiny_folder())
    want = served.offline(tokenizer.encode_chat(USER), max_tokens=24, ignore_eos=True)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role, choice.logprobs) == ("chat.completion", "assistant", None)
    assert (choice.message.content, choice.finish_reason) == (want.text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(want.prompt_token_ids), 24)
    assert answer.id.startswith("chatcmpl-")


def test_both_stream_to_the_openai_client(served: Served) -> None:
    create: Any = served.ai.completions.create
    usage = {"include_usage": True}
    chunks = list(
        create(model="tiny", prompt=PROMPT, max_tokens=9, stream=True, stream_options=usage, extra_body=GREEDY)
    )
    assert (
        "".join(c.choices[0].text for c in chunks if c.choices)
        == served.offline(PROMPT, max_tokens=9, ignore_eos=True).text
    )
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [9]
    assert not chunks[-1].choices, "usage comes alone, after all else"

    create = served.ai.chat.completions.create
    whole = create(model="tiny", messages=USER, max_tokens=9, extra_body=GREEDY)
    chunks = list(create(model="tiny", messages=USER, max_tokens=9, stream=True, extra_body=GREEDY))
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content for d in deltas) == whole.choices[0].message.content
    assert [d.role for d in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert [c.choices[0].finish_reason for c in chunks] == [*[None] * (len(chunks) - 1), "length"]
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_an_answer_can_be_handed_back_as_history(served: Served) -> None:
    """Both forms in which clients keep it: the object, and a dump with all its nulls."""
    create = served.ai.chat.completions.create
    message = create(model="tiny", messages=USER, max_tokens=3, extra_body=GREEDY).choices[0].message
    for said in (message, message.model_dump()):
        answer = create(model="tiny", messages=[*USER, said, *USER], max_tokens=3, extra_body=GREEDY)
        assert answer.usage.completion_tokens == 3


# ---- streamed and whole ---------------------------------------------------------------------------------------------

SAME = {
    "greedy": {"max_tokens": 40, **GREEDY},
    "sampled, three choices": {"max_tokens": 20, "temperature": 1.5, "seed": 5, "n": 3, "ignore_eos": True},
    "stop strings": {"max_tokens": 60, "temperature": 2, "seed": 1, "stop": ["a", "的", "e "], "n": 4},
    "stop token": {"max_tokens": 60, "temperature": 2, "seed": 2, "stop_token_ids": list(range(300, 600)), "n": 2},
    "penalties": {"max_tokens": 30, "temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 1},
    "one token": {"max_tokens": 1, **GREEDY},
}


@pytest.mark.fault(28)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("case", SAME)
def test_stream_and_whole_say_the_same(served: Served, case: str, chat: bool) -> None:
    body = {**SAME[case], **({"messages": USER} if chat else {"prompt": PROMPT})}
    body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    whole = served.good(chat, **body)
    events = served.events(chat, **body, stream_options={"include_usage": True})
    choices = whole["choices"]
    assert texts(events) == [c["message"]["content"] if chat else c["text"] for c in choices]
    assert reasons(events) == [c["finish_reason"] for c in choices]
    usage = whole["usage"]
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert {k: v for k, v in events[-1]["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in usage.items() if k != "prompt_tokens_details"
    }
    for choice in choices:
        parts = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == choice["index"]]
        for key, value in choice["logprobs"].items():
            if isinstance(value, list):
                assert [x for part in parts for x in part[key]] == value, key
    assert usage["completion_tokens"] == sum(len(c["logprobs"]["content" if chat else "tokens"]) for c in choices)


def test_a_stream_without_include_usage_tells_none(served: Served) -> None:
    assert all("usage" not in event for event in served.events(prompt=PROMPT, max_tokens=3, **GREEDY))


# ---- how answers end ------------------------------------------------------------------------------------------------


@pytest.mark.fault(1)
@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_max_tokens_is_counted_exactly(served: Served, count: int) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = served.good(True, messages=USER, logprobs=True, **{field: count}, **GREEDY)
        assert answer["usage"]["completion_tokens"] == count
        assert len(answer["choices"][0]["logprobs"]["content"]) == count
    answer = served.good(prompt=PROMPT, logprobs=0, max_tokens=count, **GREEDY)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == count


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    full = served.offline(PROMPT, max_tokens=40, ignore_eos=True)
    stop = full.text[9:12]
    want = served.offline(PROMPT, max_tokens=40, ignore_eos=True, stop=(stop,))
    assert want.text == full.text[: full.text.index(stop)]
    for form in (stop, [stop], ["never seen", stop]):
        answer = served.good(prompt=PROMPT, max_tokens=40, stop=form, **GREEDY)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (want.text, "stop")
        assert answer["usage"]["completion_tokens"] == len(want.token_ids)


def test_a_stop_token_ends_the_text_before_it_though_it_has_text(served: Served) -> None:
    full = served.offline(PROMPT, max_tokens=20, ignore_eos=True)
    stop = next(t for i, t in enumerate(full.token_ids) if i > 2 and t not in full.token_ids[:i])
    want = served.offline(PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    answer = served.good(prompt=PROMPT, max_tokens=20, stop_token_ids=[stop], **GREEDY)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (want.text, "stop")
    assert answer["usage"]["completion_tokens"] == full.token_ids.index(stop) + 1


def test_a_real_model_ends_itself_and_its_end_token_is_no_text(smollm2: Served) -> None:
    messages = [{"role": "user", "content": "Say just the word hello."}]
    answer = smollm2.good(True, messages=messages, temperature=0, logprobs=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert "hello" in choice["message"]["content"].lower()
    assert "<|" not in choice["message"]["content"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens[-1] == "<|im_end|>"
    assert "".join(tokens[:-1]) == choice["message"]["content"]
    assert answer["usage"]["completion_tokens"] == len(tokens), "the end token was computed, so it counts"
    events = smollm2.events(True, messages=messages, temperature=0)
    assert (texts(events), reasons(events)) == ([choice["message"]["content"]], ["stop"])
    more = smollm2.good(True, messages=messages, temperature=0, ignore_eos=True, max_tokens=len(tokens) + 3)
    assert (more["choices"][0]["finish_reason"], more["usage"]["completion_tokens"]) == ("length", len(tokens) + 3)


def test_the_real_model_answers_a_question(smollm2: Served) -> None:
    answer = smollm2.good(prompt="The capital of France is", max_tokens=6, temperature=0)
    assert "Paris" in answer["choices"][0]["text"]


def test_silence_means_the_defaults(served: Served) -> None:
    """16 tokens for a completion, the rest of the context for a chat, temperature 1."""
    answer = served.good(prompt=PROMPT, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    answer = served.good(True, messages=USER, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"
    texts = [served.good(prompt=PROMPT, seed=4, **more)["choices"][0]["text"] for more in ({}, {"temperature": 1})]
    assert texts[0] == texts[1]


def test_a_completion_that_nearly_fills_the_context_gets_what_is_left(served: Served) -> None:
    answer = served.good(prompt=[5] * (MAX_MODEL_LEN - 3), **GREEDY)
    assert answer["usage"]["completion_tokens"] == 3


# ---- choices and prompts --------------------------------------------------------------------------------------------


def test_choice_i_of_a_seed_is_the_answer_to_seed_plus_i(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.2, "ignore_eos": True}
    answer = served.good(**body, seed=41, n=3)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    alone = [served.good(**body, seed=41 + i)["choices"][0]["text"] for i in range(3)]
    assert [c["text"] for c in answer["choices"]] == alone
    assert len(set(alone)) == 3
    assert answer["usage"]["prompt_tokens"] == served.good(**body)["usage"]["prompt_tokens"], "one prompt counts once"
    assert answer["usage"]["completion_tokens"] == 36


def test_requests_without_a_seed_differ(served: Served) -> None:
    answer = served.good(prompt=PROMPT, n=4, max_tokens=12)
    texts = [c["text"] for c in answer["choices"]]
    texts += [served.good(prompt=PROMPT, max_tokens=12)["choices"][0]["text"] for _ in range(3)]
    assert len(set(texts)) == len(texts)


def test_a_batch_of_prompts_is_answered_in_its_order(served: Served) -> None:
    prompts = ["the cat", "什么", "the cat"]
    alone = [served.good(prompt=p, max_tokens=8, **GREEDY) for p in prompts]
    answer = served.good(prompt=prompts, max_tokens=8, **GREEDY)
    assert [c["text"] for c in answer["choices"]] == [a["choices"][0]["text"] for a in alone]
    for key in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][key] == sum(a["usage"][key] for a in alone)
    two = served.good(prompt=prompts[:2], n=2, max_tokens=4, **GREEDY)
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3]
    assert two["choices"][0]["text"] == two["choices"][1]["text"] != two["choices"][2]["text"]


def test_token_ids_are_prompts_too(served: Served) -> None:
    ids = served.offline("the cat", max_tokens=1).prompt_token_ids
    want = served.good(prompt="the cat", max_tokens=8, **GREEDY)
    for form in (ids, [ids], [ids, ids]):
        answer = served.good(prompt=form, max_tokens=8, **GREEDY)
        assert {c["text"] for c in answer["choices"]} == {want["choices"][0]["text"]}
        assert answer["usage"]["prompt_tokens"] == len(ids) * len(answer["choices"])


@pytest.mark.fault(28)
def test_content_parts_are_their_text(served: Served) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    want = served.good(True, messages=[{"role": "system", "content": "x"}, *USER], max_tokens=6, **GREEDY)
    for system in ("system", "developer"):
        messages = [{"role": system, "content": "x"}, {"role": "user", "content": parts}]
        answer = served.good(True, messages=messages, max_tokens=6, **GREEDY)
        assert answer["choices"] == want["choices"]


# ---- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_transformers(served: Served) -> None:
    want = served.offline(PROMPT, max_tokens=8, ignore_eos=True)
    logits = hf_logits(tiny_folder(), want.prompt_token_ids + want.token_ids)[len(want.prompt_token_ids) - 1 : -1]
    best = torch.log_softmax(logits, -1)
    chosen = [float(row[token]) for row, token in zip(best, want.token_ids, strict=True)]
    top = best.topk(3).values.tolist()
    for more in ({}, {"temperature": 0, "top_p": 0.1, "presence_penalty": 0}):
        answer = served.good(prompt=PROMPT, max_tokens=8, logprobs=3, **GREEDY | more)
        found = answer["choices"][0]["logprobs"]
        assert found["token_logprobs"] == pytest.approx(chosen, abs=1e-3)
        for values, row in zip(found["top_logprobs"], top, strict=True):
            assert len(values) >= 2, "of three; two of them may have the same text"
            assert max(values.values()) == pytest.approx(row[0], abs=1e-3)
            assert all(min(abs(v - t) for t in row) < 1e-3 for v in values.values())
        assert found["text_offset"][0] == 0


def test_chat_logprobs_are_those_of_transformers(served: Served) -> None:
    answer = served.good(True, messages=USER, max_tokens=6, logprobs=True, top_logprobs=2, **GREEDY)
    tokenizer = importlib.import_module(f"{served.chapter}.tokenizer").Tokenizer(tiny_folder())
    want = served.offline(tokenizer.encode_chat(USER), max_tokens=6, ignore_eos=True)
    ids = want.prompt_token_ids + want.token_ids
    best = torch.log_softmax(hf_logits(tiny_folder(), ids)[len(want.prompt_token_ids) - 1 : -1], -1).topk(2).values
    for entry, row in zip(answer["choices"][0]["logprobs"]["content"], best.tolist(), strict=True):
        assert entry["logprob"] == pytest.approx(row[0], abs=1e-3)
        assert [t["logprob"] for t in entry["top_logprobs"]] == pytest.approx(row, abs=1e-3)
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    plain = served.good(True, messages=USER, max_tokens=2, logprobs=True, **GREEDY)["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in plain["content"]] == [[], []]


# ---- more than OpenAI has, and what it has without effect -----------------------------------------------------------


def test_the_extra_fields_reach_the_sampler(served: Served) -> None:
    greedy = served.good(prompt=PROMPT, max_tokens=12, **GREEDY)["choices"][0]["text"]
    hot = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "seed": 0, "ignore_eos": True}
    assert served.good(**hot)["choices"][0]["text"] != greedy
    for more in ({"top_k": 1}, {"min_p": 1}, {"top_p": 1e-6}):
        assert served.good(**hot, **more)["choices"][0]["text"] == greedy
    for more in ({"top_k": 0}, {"top_k": -1}, {"min_p": 0}, {"repetition_penalty": 1}):
        assert served.good(**hot, **more)["choices"][0]["text"] == served.good(**hot)["choices"][0]["text"]
    for more in ({"repetition_penalty": 5.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        want = served.offline("a a a a a", max_tokens=12, ignore_eos=True, **more).text
        assert served.good(prompt="a a a a a", max_tokens=12, **GREEDY, **more)["choices"][0]["text"] == want


NO_OPS: dict[str, Any] = {
    "n": 1, "user": "me", "metadata": {"a": "b"}, "response_format": {"type": "text"}, "stop": [], "best_of": 1,
    "logit_bias": {}, "echo": False, "suffix": None, "store": False, "tools": [], "tool_choice": "none", "stream": False,
    "service_tier": "auto", "functions": [], "stream_options": None, "logprobs": None, "seed": None, "top_p": None,
    "modalities": ["text"], "never_heard_of": None, "stop_token_ids": [],
}  # fmt: skip


def test_fields_that_ask_for_nothing_are_accepted(served: Served) -> None:
    for chat, prompt in ((False, {"prompt": "x"}), (True, {"messages": USER})):
        want = served.good(chat, **prompt, max_tokens=3, **GREEDY)["choices"]
        for name, value in NO_OPS.items():
            body = {**prompt, "max_tokens": 3, **GREEDY, name: value}
            assert served.good(chat, **body)["choices"] == want, name
        assert served.good(chat, **prompt, **NO_OPS, max_tokens=3, **GREEDY)["choices"] == want


UNSUPPORTED: dict[str, Any] = {
    "best_of": 2, "logit_bias": {"5": 1}, "echo": True, "suffix": "x", "tools": [{"type": "function"}],
    "response_format": {"type": "json_object"}, "tool_choice": "required", "modalities": ["audio"], "audio": {"voice": "x"},
    "functions": [{"name": "f"}], "reasoning_effort": "low", "service_tier": "priority", "store": True,
    "prediction": {"type": "content"}, "verbosity": "low", "web_search_options": {}, "never_heard_of": 1,
}  # fmt: skip


@pytest.mark.fault(28)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_ask_for_more_than_there_is_are_refused(served: Served, name: str) -> None:
    for chat, prompt in ((False, {"prompt": "x"}), (True, {"messages": USER})):
        answer = served.post({**prompt, name: UNSUPPORTED[name]}, chat)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert name in error["message"]
