"""What happens to a request before the engine has it: prompts that wait to be tokenized, heads, bodies and pipelines."""

from __future__ import annotations

import importlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common import http
from tests.puppet import InProcess, Puppet, Script, in_process
from tests.serving import CONTROL, FRONTS, Served, connection, refused, running, tiny_folder, until

NAME = FRONTS[-1]
LONG = "the cat " * 1000  # more than is tokenized at once, less than cannot fit


@pytest.fixture
def puppet() -> Puppet:
    return Puppet(NAME, lambda m: Script([5] * m.max_tokens))


@pytest.fixture
def near(puppet: Puppet) -> Iterator[InProcess]:
    with in_process(NAME, puppet, request_timeout=2.0, max_queue=2) as server:
        yield server


class Tokenizing:
    """Long prompts are not through before ``open`` is set; ``begun`` counts them."""

    def __init__(self, server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun = threading.Event(), 0
        encode = server.frontend.tokenizer.encode

        def slow(text: str, special_tokens: bool = True) -> list[int]:
            if len(text) > 4096:
                self.begun += 1
                assert self.open.wait(20)
            return encode(text[:100], special_tokens)

        monkeypatch.setattr(server.frontend.tokenizer, "encode", slow)


def test_a_prompt_that_no_tokens_could_make_fit_is_refused_unread(near: InProcess, monkeypatch: Any) -> None:
    slow = Tokenizing(near, monkeypatch)
    refused(
        near, near.post({"prompt": "a" * 1_000_000}), 400, "1000000 characters", "max_model_len 512", param="prompt"
    )
    chat = {"messages": [{"role": "user", "content": "a" * 1_000_000}]}
    refused(near, near.post(chat, chat=True), 400, "characters are more than max_model_len", param="messages")
    assert slow.begun == 0


def test_prompts_that_wait_to_be_tokenized_wait_within_the_time_limit_and_the_queue(
    near: InProcess, monkeypatch: Any
) -> None:
    slow = Tokenizing(near, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        two = [pool.submit(near.post, {"prompt": LONG}) for _ in range(2)]
        until(lambda: slow.begun)
        time.sleep(0.5)
        for prompt in (LONG, "x"):  # a short one may not take a place that was given
            full = near.post({"prompt": prompt})
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        for job in two:
            refused(near, job.result(), 504, "--request-timeout")
        assert time.monotonic() - started < 15
    slow.open.set()
    assert near.good(prompt=LONG, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert slow.begun == 2, "the one that had to wait and was given up was never begun"


def test_the_prompt_of_a_client_that_has_gone_is_not_tokenized(near: InProcess, monkeypatch: Any) -> None:
    slow = Tokenizing(near, monkeypatch)
    with connection(near.url, {"prompt": LONG}):
        until(lambda: slow.begun)
        with connection(near.url, {"prompt": LONG}):
            time.sleep(0.1)
        time.sleep(0.1)
        slow.open.set()
        near.forgotten()
    assert slow.begun == 1


# ---- heads, bodies, pipelines ---------------------------------------------------------------------------------------


def message(body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 20)


def test_a_client_that_hangs_up_is_noticed_although_it_has_sent_its_next_requests(puppet: Puppet) -> None:
    with in_process(NAME, puppet) as server:
        puppet.flow.clear()
        for following in (message(CONTROL), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3):
            with connect(server) as raw:
                raw.sendall(message(CONTROL) + following)
                until(lambda: puppet.open)
            server.forgotten()
            until(lambda: not puppet.open)


def test_pipelined_requests_are_answered_in_their_order(puppet: Puppet) -> None:
    with in_process(NAME, puppet) as server, connect(server) as raw:
        raw.sendall(b"".join(message(CONTROL | {"max_tokens": count}) for count in (3, 1, 2)))
        seen = b""
        while seen.count(b'"completion_tokens"') < 3:
            seen += raw.recv(65536)
        counts = [int(part.split(b",")[0]) for part in seen.split(b'"completion_tokens":')[1:]]
        assert counts == [3, 1, 2]


UPGRADES = {
    "Java's client": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB"),
    "a websocket": ("Connection: keep-alive, upgrade", "UPGRADE : websocket"),
}


@pytest.mark.parametrize("offer", UPGRADES)
def test_an_offer_to_upgrade_is_passed_over_and_the_body_kept(puppet: Puppet, offer: str) -> None:
    with in_process(NAME, puppet) as server, connect(server) as raw:
        for _ in range(2):
            raw.sendall(message(CONTROL | {"max_tokens": 2, "prompt": "a\r\nupgrade: b"}, *UPGRADES[offer]))
            answer = b""
            while b'"usage"' not in answer and b"error" not in answer:
                answer += raw.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
        (ids,) = {tuple(m.token_ids) for m in puppet.submitted}
        assert list(ids) == server.frontend.tokenizer.encode("a\r\nupgrade: b"), "the body is left as it is"


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_come_ends_the_connection(puppet: Puppet, monkeypatch: Any, begun: bytes) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.3)
    started = time.monotonic()
    with in_process(NAME, puppet) as server, connect(server) as raw:
        raw.sendall(begun)
        assert raw.recv(100) == b""
        assert 0.2 < time.monotonic() - started < 10


def test_the_rest_of_a_body_that_was_refused_holds_no_connection(puppet: Puppet, monkeypatch: Any) -> None:
    """Answered before its body was here; then one more byte of it, and silence."""
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.5)
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    with in_process(NAME, puppet) as server, connect(server) as raw:
        raw.sendall(head + b"{")
        assert raw.recv(1000).startswith(b"HTTP/1.1 404")
        raw.sendall(b" ")
        raw.settimeout(20)
        while raw.recv(1000):
            pass
        with connect(server) as other:  # and whoever sends all of it may go on
            other.sendall(head + b" " * 1_000_000 + message(CONTROL))
            seen = b""
            while b'"usage"' not in seen:
                part = other.recv(65536)
                assert part, seen
                seen += part


def test_who_is_being_answered_may_take_its_time_with_the_next_head(puppet: Puppet, monkeypatch: Any) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.2)
    puppet.flow.clear()
    with in_process(NAME, puppet) as server, connect(server) as raw:
        raw.sendall(message(CONTROL) + b"GET /hea")
        time.sleep(0.6)
        puppet.flow.set()
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


# ---- options --------------------------------------------------------------------------------------------------------


def test_a_key_is_bytes_and_the_scheme_has_no_case(puppet: Puppet) -> None:
    with in_process(NAME, puppet, api_key="cl\u00e9") as server:
        for value, status in (
            ("Bearer cl\u00e9", 200),
            ("bearer cl\u00e9", 200),
            ("Bearer cle", 401),
            ("cl\u00e9", 401),
        ):
            headers = {"authorization": value.encode()}
            assert server.post(CONTROL, headers=headers).status_code == status


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 50.5}, {"min_p": 2}])
def test_a_generation_config_that_no_request_could_follow_is_an_error_of_the_start(
    puppet: Puppet, tmp_path: Any, values: dict[str, Any]
) -> None:
    folder = shutil.copytree(tiny_folder(), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(values))
    wrong = pytest.raises(ValueError, match=rf"generation_config.json of model: {next(iter(values))} must be")
    with wrong, in_process(NAME, puppet, folder):
        pass


# ---- what asks for nothing, and what contradicts itself -------------------------------------------------------------


def test_an_answer_may_come_back_as_history_with_its_empty_fields(puppet: Puppet) -> None:
    with in_process(NAME, puppet) as server:
        history = {"role": "assistant", "content": "y", "tool_calls": [], "annotations": [], "refusal": None}
        messages = [{"role": "user", "content": "x"}, history, {"role": "user", "content": "z"}]
        server.good(chat=True, messages=messages, max_tokens=2)
        messages[1]["tool_calls"] = [{"id": "1"}]
        refused(server, server.post({"messages": messages}, chat=True), 400, "tool_calls")


def test_two_limits_that_differ_are_refused_and_usage_that_is_not_wanted_needs_no_stream(puppet: Puppet) -> None:
    with in_process(NAME, puppet) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2}
        assert server.post(body | {"max_tokens": 2}, chat=True).status_code == 200
        refused(server, server.post(body | {"max_tokens": 3}, chat=True), 400, "contradict", param="max_tokens")
        assert server.post(CONTROL | {"stream_options": {"include_usage": False}}).status_code == 200


# ---- logprobs of parts of characters --------------------------------------------------------------------------------


def test_alternatives_that_are_no_whole_text_keep_names_of_their_own() -> None:
    protocol = importlib.import_module(f"{NAME}.protocol")
    names = {5: "\ufffd", 6: "\ufffd", 7: "a", 8: "a"}
    entries = [{"token_id": 5, "logprob": -0.1, "top": {5: -0.1, 6: -2.0, 7: -3.0, 8: -4.0}}]
    found = protocol.completion_logprobs(entries, names.get, [0])
    assert found == {
        "tokens": ["token_id:5"],
        "token_logprobs": [-0.1],
        "top_logprobs": [{"token_id:5": -0.1, "token_id:6": -2.0, "a": -3.0}],
        "text_offset": [0],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text_also_where_a_character_takes_several_tokens(stream: bool) -> None:
    """Script: the tokens of a text with characters of three and four bytes."""
    tokenizer = importlib.import_module(f"{NAME}.tokenizer").Tokenizer(tiny_folder())
    text = "a\u4e2db\U0001f600c"
    ids = tokenizer.encode(text, special_tokens=False)
    puppet = Puppet(NAME, lambda m: Script(ids))
    with in_process(NAME, puppet) as server:
        body = {"prompt": "x", "max_tokens": len(ids), "temperature": 0, "logprobs": 0}
        choices = [e["choices"][0] for e in server.events(**body)] if stream else server.good(**body)["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    found = [pair for c in choices for pair in zip(c["logprobs"]["tokens"], c["logprobs"]["text_offset"], strict=True)]
    assert len(found) == len(ids)
    for token, offset in found:
        assert token.startswith("token_id:") or text[offset:].startswith(token)


@pytest.fixture(scope="module", params=FRONTS[1:])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    yield from running(request.param)


def test_the_choices_of_a_prompt_count_what_was_cached_before_them(served: Served) -> None:
    prompt = list(range(5, 75))
    for cached in (0, 64):
        usage = served.good(prompt=prompt, max_tokens=2, temperature=0, n=3)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
