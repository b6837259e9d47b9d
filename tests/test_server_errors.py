"""Whatever a client sends, it gets the status that fits, in OpenAI's form, and the next client notices nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import (
    CONTROL,
    FRONTS,
    MAX_MODEL_LEN,
    Served,
    refused,
    running,
)

USER = [{"role": "user", "content": "x"}]
NAN, INF = float("nan"), float("inf")
HUGE = 10**49


@pytest.fixture(scope="module", params=FRONTS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """None of this depends on the engine: one chapter per version of the server is enough."""
    yield from running(request.param)


# ---- values ---------------------------------------------------------------------------------------------------------

NUMBERS = {
    "temperature": [-0.1, 101, NAN, INF, -INF, HUGE, "1", True, [], {}],
    "top_p": [0, -1, 1.1, NAN, INF, "x", False, [1]],
    "top_k": [-2, 1.5, HUGE, 10**5000, NAN, "5", True, 2**31],
    "min_p": [-0.1, 1.1, NAN, "0", HUGE],
    "repetition_penalty": [0, -1, NAN, INF, 101, "1"],
    "presence_penalty": [-2.1, 2.1, NAN, HUGE, {}],
    "frequency_penalty": [-2.1, 2.1, INF, "0.5"],
    "max_tokens": [0, -1, 1.5, "16", True, NAN, INF, HUGE, 10**5000, [1], 2**31, 2**63],
    "seed": [1.5, "1", True, 2**63, -(2**63) - 1, HUGE, 10**5000, NAN],
    "n": [0, -1, 1.5, "2", True, 129, HUGE, NAN, [1]],
    "stop": [1, {}, "", [""], [1], ["a", None], "\ud800", ["a", "\udfff"], ["x"] * 65, True],
    "stop_token_ids": [5, "5", [-1], [1.5], [True], [HUGE], [10**5000], ["5"], [2**31], [1003], {"a": 1}],
    "ignore_eos": ["true", 1, 0, [], {}],
    "stream": ["true", 1, [], {}],
    "stream_options": [True, [], "x", {"include_usage": "yes"}, {"unknown": 1}, {"include_usage": True}],
    "model": [5, [], {}, True],
}  # fmt: skip


@pytest.mark.fault(19)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_bad_value_is_refused_with_its_name(served: Served, name: str, chat: bool) -> None:
    for value in NUMBERS[name]:
        body = {**({"messages": USER} if chat else {"prompt": "x"}), name: value}
        refused(served, served.post(_raw(body), chat), 400, name, param=name)


def _raw(body: Any) -> bytes:
    """JSON with the integers that Python's own writer refuses."""
    marks: dict[str, str] = {}

    def mark(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**4000:
            marks[f'"@{len(marks)}"'] = "1" + "0" * 5000
            return f"@{len(marks) - 1}"
        if isinstance(value, list):
            return [mark(v) for v in value]
        return {k: mark(v) for k, v in value.items()} if isinstance(value, dict) else value

    text = json.dumps(mark(body))
    for key, digits in marks.items():
        text = text.replace(key, digits)
    return text.encode()


@pytest.mark.parametrize(
    "number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" * 50, "1" * 5000, "-" + "9" * 400]
)
def test_numbers_that_json_or_floats_do_not_have_are_refused(served: Served, number: str) -> None:
    for name in ("temperature", "max_tokens", "seed", "top_k", "n"):
        refused(served, served.post(f'{{"prompt": "x", "{name}": {number}}}'.encode()), 400, name, param=name)
    refused(served, served.post(f'{{"prompt": [{number}]}}'.encode()), 400, param="prompt")


BAD_PROMPTS = [
    "", [], [""], [[]], ["a", ""], [[5], []], 5, True, {}, {"a": 1}, [5, "a"], ["a", 5], [[5], "a"], [5.0], [True], [[True]],
    [-1], [1003], [5, 2**31], [HUGE], [[5], [1003]], [[[5]]], [None], "\ud800", ["ok", "a\udc80b"], ["a"] * 1025,
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda value: ascii(value)[:30])
def test_a_bad_prompt_is_refused(served: Served, prompt: Any) -> None:
    refused(served, served.post({"prompt": prompt, "max_tokens": 1}), 400, param="prompt")


BAD_MESSAGES = [
    [], "x", {}, 5, [5], ["x"], [[]], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": 5, "content": "x"}],
    [{"role": "tool", "content": "x"}], [{"role": "", "content": "x"}], [{"role": "\ud800", "content": "x"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": None}], [{"role": "user", "content": {}}],
    [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "text", "text": "\udcff"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    [{"role": "user", "content": "x", "tool_calls": [{}]}], [{"role": "user", "content": "x", "\ud800": 1}],
    [{"role": "user", "content": "x", "name": 5}], [*USER, None], [USER],
]  # fmt: skip


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda value: ascii(value)[:40])
def test_bad_messages_are_refused(served: Served, messages: Any) -> None:
    refused(served, served.post({"messages": messages, "max_tokens": 1}, chat=True), 400, "messages", param="messages")


def test_a_missing_field_and_an_unknown_one_are_named(served: Served) -> None:
    refused(served, served.post({}), 400, "prompt", param="prompt")
    refused(served, served.post({}, chat=True), 400, "messages", param="messages")
    refused(served, served.post({"prompt": "x", "messages": USER}), 400, "messages", param="messages")
    refused(served, served.post({"messages": USER, "prompt": "x"}, chat=True), 400, "prompt", param="prompt")
    refused(served, served.post({"prompt": "x", "tempreature": 1}), 400, "'tempreature'", param="tempreature")
    for key in ("\ud800", "", "a" * 100_000, "\x00\n", "缓存"):
        refused(served, served.post({"prompt": "x", key: 1}), 400, "unknown field")


def test_fields_of_a_chat_are_named_as_the_client_wrote_them(served: Served) -> None:
    for name, value in (("max_completion_tokens", 0), ("max_completion_tokens", 2**40), ("max_tokens", 0)):
        refused(served, served.post({"messages": USER, name: value}, chat=True), 400, name, param=name)
    for top in (-1, 21, HUGE, "3"):
        body = {"messages": USER, "logprobs": True, "top_logprobs": top}
        refused(served, served.post(body, chat=True), 400, "top_logprobs", param="top_logprobs")
    alone = {"messages": USER, "top_logprobs": 2}
    refused(served, served.post(alone, chat=True), 400, "logprobs", param="top_logprobs")
    refused(served, served.post({"messages": USER, "logprobs": 3}, chat=True), 400, "logprobs", param="logprobs")
    for value in (-1, 21, True, "5"):
        refused(served, served.post({"prompt": "x", "logprobs": value}), 400, "logprobs", param="logprobs")


def test_the_last_seed_of_several_choices_counts_too(served: Served) -> None:
    assert served.good(prompt="x", seed=2**63 - 1, max_tokens=1)
    refused(served, served.post({"prompt": "x", "seed": 2**63 - 1, "n": 2}), 400, "seed", param="seed")


@pytest.mark.fault(20)
def test_what_cannot_fit_is_refused_with_both_lengths(served: Served) -> None:
    limit = str(MAX_MODEL_LEN)
    for prompt in ([5] * MAX_MODEL_LEN, [5] * 300_000, "the cat " * 20_000):
        answer = served.post({"prompt": prompt})
        refused(served, answer, 400, limit, param="prompt")
    refused(served, served.post({"prompt": [5] * 700}), 400, "700", limit)
    refused(served, served.post({"prompt": [5] * 500, "max_tokens": 13}), 400, "500", "13", limit)
    assert served.good(prompt=[5] * 500, max_tokens=12, ignore_eos=True)["usage"]["completion_tokens"] == 12
    long = [{"role": "user", "content": "the cat " * 500}]
    refused(served, served.post({"messages": long}, chat=True), 400, limit, param="messages")
    refused(served, served.post({"messages": USER, "max_tokens": 511}, chat=True), 400, "511", limit)
    one = served.post({"prompt": ["fits", "the cat " * 500], "max_tokens": 2})
    refused(served, one, 400, limit)


def test_more_answers_than_may_ever_wait_are_not_asked_to_come_again(served: Served) -> None:
    for body in ({"prompt": ["x"] * 300}, {"prompt": ["x"] * 10, "n": 100}):
        answer = served.post({**body, "max_tokens": 1})
        refused(served, answer, 400, "256")
        assert "retry-after" not in answer.headers


def test_an_unknown_model_is_not_found_and_none_is_fine(served: Served) -> None:
    for name in ("other", "", "\ud800", "x" * 100_000, "TINY"):
        error = refused(served, served.post({"prompt": "x", "model": name}), 404, "tiny", param="model")
        assert error["code"] == "model_not_found"
    assert served.good(prompt="x", max_tokens=1, model="tiny")
    assert served.good(prompt="x", max_tokens=1, model=None)
    assert served.good(prompt="x", max_tokens=1)


def test_the_error_of_a_stream_has_its_own_status(served: Served) -> None:
    refused(served, served.post({"prompt": "x", "stream": True, "max_tokens": 0}), 400, "max_tokens")
    refused(served, served.post({"prompt": [5] * 600, "stream": True}), 400, "600")


# ---- bodies ---------------------------------------------------------------------------------------------------------

BROKEN = [
    b"", b" ", b"{", b"nonsense", b'{"prompt": "x"', b'{"prompt": "x",}', b"{'prompt': 'x'}", b'{"prompt": "x"} more',
    b'{"prompt": "\x00"}', b'{"prompt": "\xff"}', b"\xff\xfe\x00", b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\uZZZZ"}', b"\x1f\x8b\x08\x00", b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000,
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"prompt":"x","metadata":' + b"[" * 900 + b"]" * 900 + b",}",
    b"null", b"5", b'"x"', b"[]", b'[{"prompt": "x"}]', b"true", b"-", b"1e", b"\xef\xbb\xbf", b"NaN", b"--x\r\nform\r\n",
]  # fmt: skip


@pytest.mark.parametrize("body", BROKEN, ids=lambda value: ascii(value)[:30])
def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    for chat in (False, True):
        refused(served, served.post(body, chat), 400)


def test_a_byte_order_mark_and_other_unicode_encodings_do_no_harm(served: Served) -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        assert served.post(json.dumps(CONTROL).encode(encoding)).status_code == 200


def test_another_content_type_is_refused(served: Served) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "\udc80",
        "é",
        "",
    ):
        answer = served.post(CONTROL, headers={"content-type": kind.encode("utf-8", "surrogateescape")})
        refused(served, answer, 415, "application/json")
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON"):
        assert served.post(CONTROL, headers={"content-type": kind}).status_code == 200


def test_other_paths_and_methods_are_told_so(served: Served) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/embeddings",
        "/v1/completions/x",
        "/%ff%00",
        "/v1/models/%ed%a0%80",
        "/" + "a" * 5000,
    ):
        refused(served, served.http.get(path), 404)
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("PUT", "/v1/chat/completions"),
        ("POST", "/health"),
    ):
        answer = served.http.request(method, path)
        refused(served, answer, 405, method)
        assert answer.headers["allow"]


def test_there_is_a_description_of_the_interface(served: Served) -> None:
    described = served.http.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "prompt" in described["content"]["application/json"]["schema"]["properties"]
