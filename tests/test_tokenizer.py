"""Text to ids and back: whatever the cut, the deltas add up to the full decode and nothing uncertain is handed out."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tiny import write_tokenizer
from tests.copies import copies
from tests.texts import (
    BROKEN,
    BYTE_LEVEL,
    FALLBACK,
    QUICK,
    THOROUGH,
    assert_adds_up,
    chunk_sizes,
    deltas,
    folder_of,
    id_lists,
    load,
    texts,
)


@pytest.fixture(scope="module", params=copies("tokenizer.py"))
def module(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"{request.param}.tokenizer")


@pytest.fixture(scope="module", params=BYTE_LEVEL + FALLBACK)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(module: Any, kind: str) -> Any:
    return load(module, kind)


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def byte_level(request: pytest.FixtureRequest, module: Any) -> Any:
    return load(module, request.param)


# ---- encoding -------------------------------------------------------------------------------------------------------


def test_ids_are_those_of_transformers(tokenizer: Any, kind: str) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(folder_of(kind))
    for text in ("请解释什么是 KV Cache？", "the  cat\n", "😀", "a <s> b", ""):
        assert tokenizer.encode(text) == oracle(text)["input_ids"]
        plain = tokenizer.encode(text, special_tokens=False)
        assert plain == oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(plain) == oracle.decode(plain, skip_special_tokens=True)


def test_strings_get_a_bos_where_the_model_has_one(module: Any) -> None:
    for kind, bos in (("tiny", 3), ("replace", 1)):
        tokenizer = load(module, kind)
        assert tokenizer.encode("the cat")[0] == bos
        assert bos not in tokenizer.encode("the cat", special_tokens=False)


@pytest.mark.fault(9)
@pytest.mark.parametrize("kind", FALLBACK)
def test_a_template_that_writes_bos_gives_it_exactly_once(module: Any, kind: str) -> None:
    tokenizer = load(module, kind)
    ids = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids[-1] == 2, "the template's </s> is one token, not the text of it"


def test_a_template_that_writes_no_bos_gets_none(module: Any) -> None:
    tokenizer = load(module, "tiny")
    assert tokenizer.encode("x")[0] == 3
    assert 3 not in tokenizer.encode_chat([{"role": "user", "content": "the cat"}])


def test_text_that_is_not_unicode_is_refused_with_one_line(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"not valid Unicode.*position 2") as caught:
        tokenizer.encode("ab\ud800")
    assert "\n" not in str(caught.value)
    str(caught.value).encode()  # can be printed


def test_bad_chat_messages_are_a_value_error(module: Any, tmp_path: Path) -> None:
    tokenizer = load(module, "tiny")
    for messages in ([{"role": "user"}], [{}], ["text"], [{"role": "user", "content": {"a": 1}}]):
        with pytest.raises(ValueError, match="chat template"):
            tokenizer.encode_chat(messages)
    with pytest.raises(ValueError, match="Unicode"):
        tokenizer.encode_chat([{"role": "user", "content": "\udcff"}])
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    bare = module.Tokenizer(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        bare.encode_chat([{"role": "user", "content": "x"}])


def test_code_that_comes_with_a_tokenizer_never_runs(module: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('this code ran')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        module.Tokenizer(tmp_path)


# ---- incremental text -----------------------------------------------------------------------------------------------


@QUICK
@given(data=st.data())
def test_deltas_of_text_add_up_for_any_cut(module: Any, tokenizer: Any, data: st.DataObject) -> None:
    ids = tokenizer.encode(data.draw(texts), special_tokens=False)
    out = deltas(module.Detokenizer(tokenizer), ids, data.draw(chunk_sizes))
    assert_adds_up(out, tokenizer.decode(ids))


@QUICK
@given(data=st.data())
def test_deltas_of_any_ids_add_up_for_any_cut(module: Any, tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(id_lists(tokenizer))
    out = deltas(module.Detokenizer(tokenizer), ids, data.draw(chunk_sizes))
    assert_adds_up(out, tokenizer.decode(ids))


@QUICK
@given(data=st.data())
def test_byte_level_text_is_handed_out_as_soon_as_it_is_certain(
    module: Any, byte_level: Any, data: st.DataObject
) -> None:
    ids = byte_level.encode(data.draw(texts), special_tokens=False)
    detokenizer, text = module.Detokenizer(byte_level), ""
    for at, token in enumerate(ids, start=1):
        text += detokenizer.push([token])
        assert text == byte_level.decode(ids[:at]).rstrip(BROKEN)


def test_fallback_text_waits_for_the_end_of_a_byte_run_only(module: Any) -> None:
    tokenizer = load(module, "replace")
    ids = tokenizer.encode("the 请中a", special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids][-4:] == [BROKEN, BROKEN, BROKEN, "a"], "中 is three byte tokens"
    assert deltas(module.Detokenizer(tokenizer), ids) == ["the", " ", "请", "", "", "", "中a", ""]


@pytest.mark.fault(10)
def test_a_character_cut_by_the_end_is_flushed(module: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("a😀", special_tokens=False)[:-1]
    detokenizer = module.Detokenizer(tokenizer)
    handed_out = "".join(detokenizer.push([i]) for i in ids)
    assert BROKEN not in handed_out
    rest = detokenizer.flush()
    assert BROKEN in rest
    assert handed_out + rest == tokenizer.decode(ids)
    assert detokenizer.flush() == "", "what was flushed does not come twice"


def test_pieces_are_the_text_that_tokens_have_inside_a_text(module: Any, tokenizer: Any) -> None:
    """Some decoders drop the space of a first token: two tokens would have one name, and a list of names no spaces."""
    text = "one two  three, 4 x"
    ids = tokenizer.encode(text, special_tokens=False)
    assert "".join(map(tokenizer.piece, ids)).removeprefix(" ") == text
    assert tokenizer.piece(tokenizer.encode("a b", special_tokens=False)[-1]) in (" b", "b")
    for token in ids:
        assert tokenizer.piece(token).endswith(tokenizer.decode([token]))
    special = next(iter(tokenizer._special))
    assert tokenizer.piece(special) == tokenizer.decode([special], skip_special_tokens=False) != ""


def test_special_tokens_are_never_text(module: Any, tokenizer: Any) -> None:
    special = tokenizer._hf.all_special_ids
    assert special
    plain = tokenizer.encode("the 请 😀", special_tokens=False)
    woven = [token for i in plain for token in (*special, i)] + special
    assert "".join(deltas(module.Detokenizer(tokenizer), woven)) == tokenizer.decode(plain)


def test_nothing_pushed_is_nothing_handed_out(module: Any, tokenizer: Any) -> None:
    detokenizer = module.Detokenizer(tokenizer)
    assert detokenizer.push([]) == ""
    assert detokenizer.flush() == ""


def test_a_stream_does_not_decode_its_whole_past(module: Any, tokenizer: Any) -> None:
    counted = SimpleNamespace(**{n: getattr(tokenizer, n) for n in dir(tokenizer) if not n.startswith("__")}, longest=0)

    def decode(ids: Sequence[int]) -> str:
        counted.longest = max(counted.longest, len(ids))
        return tokenizer.decode(ids)

    counted.decode = decode
    deltas(module.Detokenizer(counted), tokenizer.encode("the 请 😀 " * 50, special_tokens=False))
    assert counted.longest <= 40


# ---- the prompt's last character ------------------------------------------------------------------------------------


@QUICK
@given(data=st.data())
def test_a_prompt_cut_inside_a_character_is_completed(module: Any, tokenizer: Any, data: st.DataObject) -> None:
    before, char, after = data.draw(texts), data.draw(st.sampled_from("😀𠮷क한中é")), data.draw(texts)
    head = tokenizer.encode(before, special_tokens=False)
    whole = tokenizer.encode(before + char + after, special_tokens=False)
    full = tokenizer.decode(whole)
    at = data.draw(st.integers(max(0, len(head) - 1), len(whole)))
    prompt, output = whole[:at], whole[at:]
    text = "".join(deltas(module.Detokenizer(tokenizer, prompt), output, data.draw(chunk_sizes)))
    if not tokenizer.decode(prompt).endswith(BROKEN):
        assert text == tokenizer.decode(output)
    elif BROKEN not in full:
        complete = max(len(tokenizer.decode(whole[:n]).rstrip(BROKEN)) for n in range(at + 1))
        assert text == full[complete:]


@QUICK
@given(data=st.data())
def test_a_broken_prompt_leaves_nothing_in_the_answer(module: Any, tokenizer: Any, data: st.DataObject) -> None:
    """Random prompts often end in bytes that form no character; only an output that completes one may take it over."""
    prompt = data.draw(id_lists(tokenizer, 6))
    output = tokenizer.encode(data.draw(texts), special_tokens=False)
    if output and not tokenizer.decode(output).startswith(BROKEN):
        out = deltas(module.Detokenizer(tokenizer, prompt), output, data.draw(chunk_sizes))
        assert_adds_up(out, tokenizer.decode(output))


@QUICK
@given(data=st.data())
def test_text_after_any_prompt_does_not_depend_on_the_cut(module: Any, tokenizer: Any, data: st.DataObject) -> None:
    prompt, output = data.draw(id_lists(tokenizer, 6)), data.draw(id_lists(tokenizer))
    one = "".join(deltas(module.Detokenizer(tokenizer, prompt), output))
    assert_adds_up(deltas(module.Detokenizer(tokenizer, prompt), output, data.draw(chunk_sizes)), one)


def test_a_complete_prompt_of_byte_tokens_is_no_part_of_the_answer(module: Any, tokenizer: Any) -> None:
    for text in ("中", "中国中国中国", "😀😀😀", "é"):
        prompt = tokenizer.encode(text, special_tokens=False)
        output = tokenizer.encode("the a", special_tokens=False)
        assert "".join(deltas(module.Detokenizer(tokenizer, prompt), output)) == tokenizer.decode(output)


@pytest.mark.full
@THOROUGH
@given(data=st.data())
def test_many_more_ids_and_cuts(module: Any, tokenizer: Any, data: st.DataObject) -> None:
    prompt, output = data.draw(id_lists(tokenizer, 6)), data.draw(id_lists(tokenizer))
    assert_adds_up(deltas(module.Detokenizer(tokenizer), output, data.draw(chunk_sizes)), tokenizer.decode(output))
    one = "".join(deltas(module.Detokenizer(tokenizer, prompt), output))
    assert_adds_up(deltas(module.Detokenizer(tokenizer, prompt), output, data.draw(chunk_sizes)), one)
