"""Text of a server whose engine says what the test wants: whole characters, stop strings, special tokens, BOS, defaults."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.tiny import BOS_ID, write_tokenizer
from tests.puppet import Puppet, Script, in_process
from tests.serving import (
    FRONTS,
    texts,
    tiny_folder,
)

USER = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module", params=FRONTS)
def chapter(request: pytest.FixtureRequest) -> str:
    return request.param


def chars(chapter: str, text: str) -> list[int]:
    return importlib.import_module(f"{chapter}.tokenizer").Tokenizer(tiny_folder()).encode(text, special_tokens=False)


@pytest.mark.fault(10)
def test_a_character_cut_by_max_tokens_is_flushed_and_none_is_shown_half(chapter: str) -> None:
    """Every cut of a text of emoji and Chinese: what is streamed adds up to the decode, broken at most at its end."""
    ids = chars(chapter, "a😀什么👩‍👩‍👧é")
    tokenizer = importlib.import_module(f"{chapter}.tokenizer").Tokenizer(tiny_folder())
    with in_process(chapter, Puppet(chapter, lambda m: Script(ids[: m.max_tokens]), 0.0)) as server:
        for count in range(1, len(ids) + 1):
            want = tokenizer.decode(ids[:count])
            body = {"prompt": "x", "max_tokens": count}
            assert server.good(**body)["choices"][0]["text"] == want
            events = server.events(**body)
            assert texts(events) == [want]
            shown = "".join(c["text"] for e in events for c in e["choices"] if not c["finish_reason"])
            assert "\ufffd" not in shown
    assert "\ufffd" in tokenizer.decode(ids[:2])


@pytest.mark.fault(9)
def test_special_tokens_and_the_token_that_stops_are_no_text(chapter: str) -> None:
    ids = [*chars(chapter, "the"), 3, *chars(chapter, " cat"), 2]
    with in_process(chapter, Puppet(chapter, lambda m: Script(ids, "stop"), 0.0)) as server:
        answer = server.good(True, messages=USER)
        assert answer["choices"][0]["message"]["content"] == "the cat"
        assert answer["usage"]["completion_tokens"] == len(ids)
        assert texts(server.events(True, messages=USER)) == ["the cat"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_held_text_and_stop_strings_never_leak(stop_server: Any, data: st.DataObject) -> None:
    """The engine cuts where it found the stop string; neither it nor its beginning has been streamed by then."""
    server, puppet = stop_server
    text = data.draw(st.text("ab 什😀", min_size=1, max_size=12))
    ids = chars(server.chapter, text)
    stop = data.draw(st.sampled_from([text[i:] for i in range(len(text))]) | st.just("§"))
    cut = text.find(stop) if stop in text else None
    puppet.script = lambda m: Script(ids, "stop" if cut is not None else "length", cut)
    want = text if cut is None else text[:cut]
    assert server.good(prompt="x", stop=stop)["choices"][0]["text"] == want
    assert texts(server.events(prompt="x", stop=[stop])) == [want]


@pytest.fixture(scope="module")
def stop_server(chapter: str) -> Iterator[Any]:
    puppet = Puppet(chapter, lambda m: Script([5]), 0.0)
    with in_process(chapter, puppet) as server:
        yield server, puppet


@pytest.mark.fault(9)
def test_there_are_never_two_bos(chapter: str, tmp_path: Path) -> None:
    """A tokenizer that puts <s> in front and a template that writes it: a string gets one, a chat gets one."""
    folder = tmp_path / "bos"
    shutil.copytree(tiny_folder(), folder)
    write_tokenizer(folder, add_bos=True)
    template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(json.loads(config) | {"chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    puppet = Puppet(chapter, lambda m: Script([5]), 0.0)
    with in_process(chapter, puppet, folder) as server:
        server.good(prompt="the cat", max_tokens=1)
        server.good(True, messages=USER)
        server.good(prompt=[7, 8])
    string, chat, raw = (m.token_ids for m in puppet.submitted)
    assert string == chat
    assert string[0] == BOS_ID
    assert string.count(BOS_ID) == 1
    assert raw == [7, 8], "token ids are taken as they are"


def test_sampling_is_that_of_the_models_generation_config(chapter: str, tmp_path: Path) -> None:
    folder = tmp_path / "warm"
    shutil.copytree(tiny_folder(), folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.25, "top_p": 0.5, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(config))
    puppet = Puppet(chapter, lambda m: Script([5]), 0.0)
    with in_process(chapter, puppet, folder) as server:
        server.good(prompt="x")
        server.good(prompt="x", temperature=0.5, top_k=0)
    silent, told = (m.params for m in puppet.submitted)
    assert (silent.temperature, silent.top_p, silent.top_k) == (0.25, 0.5, 7)
    assert (told.temperature, told.top_p, told.top_k) == (0.5, 0.5, 0)
