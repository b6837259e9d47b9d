"""Stop strings: found where a search of the full decode finds them, across tokens, held back until then, cut exactly."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.copies import copies
from tests.texts import (
    BROKEN,
    BYTE_LEVEL,
    FALLBACK,
    QUICK,
    THOROUGH,
    assert_adds_up,
    chunk_sizes,
    chunks,
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


def run_with_stop(
    module: Any, tokenizer: Any, ids: Sequence[int], stop: Sequence[str], sizes: Sequence[int]
) -> tuple[list[str], int, int | None]:
    """What an engine does: the matcher decides, the detokenizer makes text. Returns deltas, tokens used, cut."""
    matcher, detokenizer = module.StopMatcher(tokenizer, [], stop), module.Detokenizer(tokenizer, [], stop)
    out, used = [], 0
    for chunk in chunks(ids, sizes):
        cut = matcher.feed(chunk)
        out.append(detokenizer.push(chunk))
        used += len(chunk)
        if cut is not None:
            return [*out, detokenizer.flush(cut)], used, cut
    return [*out, detokenizer.flush()], used, None


def searched(
    tokenizer: Any, ids: Sequence[int], stop: Sequence[str], sizes: Sequence[int]
) -> tuple[str, int, int | None]:
    """The definition: search the full decode again after every chunk; a character that is still open is no text yet."""
    used = 0
    for chunk in chunks(ids, sizes):
        used += len(chunk)
        text = tokenizer.decode(ids[:used])
        found = [text.rstrip(BROKEN).find(s) for s in stop if s in text.rstrip(BROKEN)]
        if found:
            return text[: min(found)], used, min(found)
    return tokenizer.decode(ids), used, None


@st.composite
def stops(draw: Any, text: str) -> list[str]:
    """One to three strings: parts of the text, parts with another end, or unrelated."""
    out = []
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        part = text[at : at + draw(st.integers(1, 6))]
        out.append(draw(st.sampled_from([part, part + "§", part[::-1]])) or "§")
    return [s for s in out if BROKEN not in s] or ["§"]


@QUICK
@given(data=st.data())
def test_stop_strings_are_found_where_a_search_of_the_decode_finds_them(
    module: Any, tokenizer: Any, data: st.DataObject
) -> None:
    ids = tokenizer.encode(data.draw(texts), special_tokens=False)
    stop, sizes = data.draw(stops(tokenizer.decode(ids))), data.draw(chunk_sizes)
    out, used, cut = run_with_stop(module, tokenizer, ids, stop, sizes)
    text, want_used, want_cut = searched(tokenizer, ids, stop, sizes)
    assert (used, cut) == (want_used, want_cut)
    assert_adds_up(out, text)


@QUICK
@given(data=st.data())
def test_stop_strings_in_the_text_of_any_ids(module: Any, byte_level: Any, data: st.DataObject) -> None:
    ids = data.draw(id_lists(byte_level))
    stop, sizes = data.draw(stops(byte_level.decode(ids))), data.draw(chunk_sizes)
    out, used, cut = run_with_stop(module, byte_level, ids, stop, sizes)
    text, want_used, want_cut = searched(byte_level, ids, stop, sizes)
    assert (used, cut) == (want_used, want_cut)
    assert_adds_up(out, text)


def test_a_stop_string_across_tokens_is_held_back_and_cut_exactly(module: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("the stop, a cat", special_tokens=False)
    out, used, cut = run_with_stop(module, tokenizer, ids, ["stop,"], ())
    assert "".join(out) == "the "
    assert cut == 4
    assert "stop," in tokenizer.decode(ids[:used])
    assert "stop," not in tokenizer.decode(ids[: used - 1]), "it ends with the token that completes the stop string"


def test_a_stop_string_inside_one_token_is_cut_out_of_it(module: Any, byte_level: Any) -> None:
    (the,) = byte_level.encode(" the", special_tokens=False)
    out, used, cut = run_with_stop(module, byte_level, [the, the], ["h"], ())
    assert ("".join(out), used, cut) == (" t", 1, 2)


def test_a_character_of_several_tokens_stops_with_its_last_one(module: Any, tokenizer: Any) -> None:
    """Also where bytes fall back, though their text is not yet certain: nothing may follow the token that completes."""
    ids = tokenizer.encode("a😀", special_tokens=False)
    _, used, cut = run_with_stop(module, tokenizer, [*ids, *ids], ["😀"], ())
    assert (used, cut) == (len(ids), 1)


def test_a_character_that_the_prompt_began_stops_with_its_last_byte(module: Any) -> None:
    """In a run of byte tokens, whose text is not yet certain."""
    tokenizer = load(module, FALLBACK[0])
    first, *rest = (tokenizer._fast.token_to_id(f"<0x{byte:02X}>") for byte in "存".encode())
    matcher = module.StopMatcher(tokenizer, [first], ["存"])
    assert [matcher.feed([token]) for token in rest] == [None, 0]
    detokenizer = module.Detokenizer(tokenizer, [first], ["存"])
    assert "".join([*map(detokenizer.push, [[token] for token in rest]), detokenizer.flush(0)]) == ""


def test_the_earliest_of_several_stop_strings_counts(module: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat", special_tokens=False)
    for stop in (["cat", "e c"], ["e c", "cat"], ["zzz", "e c", "e ca"]):
        assert run_with_stop(module, tokenizer, ids, stop, (len(ids),))[2] == 2


def test_the_beginning_of_a_stop_string_that_never_comes_is_flushed(module: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("the sto", special_tokens=False)
    detokenizer = module.Detokenizer(tokenizer, (), ["stop", "torn"])
    text = "".join(detokenizer.push([i]) for i in ids)
    assert text == "the "
    assert detokenizer.flush() == "sto"


def test_held_text_comes_out_when_it_turns_out_harmless(module: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("stst", special_tokens=False)
    detokenizer = module.Detokenizer(tokenizer, (), ["sto"])
    assert "".join(detokenizer.push([i]) for i in ids) == "st"
    assert detokenizer.push([tokenizer._fast.token_to_id("a")]) == "sta"


def test_special_tokens_do_not_break_a_stop_string(module: Any, tokenizer: Any) -> None:
    special = tokenizer._hf.all_special_ids[0]
    ids = [token for i in tokenizer.encode("the stop", special_tokens=False) for token in (i, special)]
    out, used, cut = run_with_stop(module, tokenizer, ids, ["stop"], ())
    assert ("".join(out), cut) == ("the ", 4)
    assert used == len(ids) - 1


def test_a_request_without_stop_strings_has_no_matcher(module: Any, tokenizer: Any) -> None:
    core = importlib.import_module(f"{module.__package__}.core")
    for stop, kind in (((), type(None)), (("x",), module.StopMatcher)):
        req = core.Req(0, [5, 6], 2, core.SamplingParams(stop=stop), max_tokens=3)
        assert isinstance(module.stop_matcher(tokenizer, req), kind)


@pytest.mark.full
@THOROUGH
@given(data=st.data())
def test_many_more_stop_strings(module: Any, byte_level: Any, data: st.DataObject) -> None:
    ids = data.draw(id_lists(byte_level))
    stop, sizes = data.draw(stops(byte_level.decode(ids))), data.draw(chunk_sizes)
    out, used, cut = run_with_stop(module, byte_level, ids, stop, sizes)
    text, *want = searched(byte_level, ids, stop, sizes)
    assert [used, cut] == want
    assert_adds_up(out, text)
