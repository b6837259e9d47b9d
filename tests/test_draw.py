"""The sequence diagram: what is shortened, what is written where, and that any machine's fonts give a clean picture."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import matplotlib
import pytest
from matplotlib import font_manager

from common import draw
from common.trace import OFFICIAL_NOTE, Component, Event

HOPS = [
    Component("LLM", "chapter/llm.py", "llm/llm.py"),
    Component("Tokenizer", "chapter/tokenizer.py", "tokenizer/tokenize.py"),
    Component("Scheduler", "chapter/scheduler.py", "scheduler/scheduler.py"),
    Component("ModelRunner", "chapter/model_runner.py", "engine/engine.py"),
    Component("Detokenizer", "chapter/tokenizer.py", "tokenizer/detokenize.py"),
    Component("Sampler", "chapter/sampler.py", ""),
]
PROMPT = "请解释什么是 KV Cache？"
ONE = [  # two tokens for one request; times chosen so that every number below is exact
    Event(0.000, 0, "LLM", "submit", 0, text=PROMPT),
    Event(0.001, 0, "Tokenizer", "encode", 0, length=9),
    Event(0.002, 0, "Scheduler", "add", 0, state="WAITING", length=9),
    Event(0.003, 1, "Scheduler", "schedule", 0, state="PREFILL", cached_len=0, extend_len=9, pages=2),
    Event(0.013, 1, "ModelRunner", "forward", 0, dur=0.010),
    Event(0.014, 1, "Scheduler", "process", 0, token=42),
    Event(0.014, 1, "Detokenizer", "push", 0, text="缓存"),
    Event(0.015, 2, "Scheduler", "schedule", 0, state="DECODE", cached_len=9, extend_len=1, pages=2),
    Event(0.019, 2, "ModelRunner", "forward", 0, dur=0.004),
    Event(0.020, 2, "Scheduler", "process", 0, token=43),
    Event(0.021, 2, "Detokenizer", "push", 0, text="[b]\n"),
    Event(0.022, 2, "Scheduler", "finish", 0, state="FINISHED", note="length"),
    Event(0.023, 2, "LLM", "output", 0, text="缓存[b]\n"),
]


def long_trace(steps: int, odd_step: int = 0) -> list[Event]:
    """``steps`` steps of five events; ``odd_step`` does something else."""
    out = []
    for s in range(1, steps + 1):
        first = "preempt" if s == odd_step else "schedule"
        out += [
            Event(s, s, "Scheduler", first, 0, state="DECODE", cached_len=s, extend_len=1),
            Event(s, s, "ModelRunner", "forward", 0, dur=0.01),
            Event(s, s, "Sampler", "sample", 0, token=s, text="好"),
            Event(s, s, "Scheduler", "process", 0, token=s),
            Event(s, s, "Detokenizer", "push", 0, text="好"),
        ]
    return out


# ---- what the picture shows -----------------------------------------------------------------------------------------


def test_bands_are_the_steps_labelled_with_their_phase() -> None:
    assert [b.label for b in draw.bands(ONE)] == ["before step 1", "step 1 · PREFILL", "step 2 · DECODE"]


def test_a_step_with_both_phases_is_mixed() -> None:
    both = [Event(0, 4, "Scheduler", "schedule", i, state=s) for i, s in enumerate(("PREFILL", "DECODE"))]
    assert [b.label for b in draw.bands(both)] == ["step 4 · MIXED"]


def test_a_trace_of_64_events_is_drawn_whole() -> None:
    events = [*long_trace(12), *ONE[:4]]
    assert sum(len(b.events) for b in draw.bands(events)) == 64


def test_a_long_trace_loses_its_middle_and_says_so() -> None:
    bands = draw.bands(long_trace(40))
    (gap,) = [b.gap for b in bands if b.gap]
    assert gap == "… steps 7–34 alike …"
    assert [b.step for b in bands if not b.gap] == [1, 2, 3, 4, 5, 6, 35, 36, 37, 38, 39, 40]
    assert sum(len(b.events) for b in bands) <= draw.MAX_EVENTS


def test_the_gap_does_not_say_alike_where_a_hidden_step_differs() -> None:
    assert [b.gap for b in draw.bands(long_trace(40, odd_step=20)) if b.gap] == ["… steps 7–34 not drawn …"]


def test_a_crowded_step_shows_its_two_ends() -> None:
    crowd = [Event(0, 0, "LLM", "submit", rid) for rid in range(100)]
    bands = draw.bands(crowd)
    assert [b.gap for b in bands] == ["", "… 75 events not drawn …", ""]
    assert bands[0].events[0].rid == 0
    assert bands[2].events[-1].rid == 99


# ---- the picture ----------------------------------------------------------------------------------------------------


@pytest.fixture
def strict(caplog: pytest.LogCaptureFixture):
    """Warnings are errors, and the font machinery has logged nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert [r.message for r in caplog.get_records("call") if r.levelno >= logging.WARNING] == []


@pytest.fixture
def no_cjk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "cjk_font", lambda: None)


@pytest.fixture
def only_simhei(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose one CJK font is a SimHei without a bold face, made here: squares for the characters used."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    for move, point in zip([pen.moveTo] + [pen.lineTo] * 3, [(0, 0), (0, 900), (900, 900), (900, 0)], strict=True):
        move(point)
    pen.closePath()
    square = pen.glyph()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder([".notdef", "square"])
    font.setupCharacterMap({ord(c): "square" for c in PROMPT + "缓存好" if ord(c) > 255})
    font.setupGlyf({".notdef": square, "square": square})
    font.setupHorizontalMetrics({".notdef": (1000, 0), "square": (1000, 0)})
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "SimHei", "styleName": "Regular"})
    font.setupOS2(usWeightClass=400)
    font.setupPost()
    font.save(tmp_path / "simhei.ttf")

    latin = [f for f in font_manager.fontManager.ttflist if f.name == draw.LATIN]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", latin)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "simhei.ttf")])
    draw.cjk_font.cache_clear()
    draw._face.cache_clear()
    yield
    draw.cjk_font.cache_clear()
    draw._face.cache_clear()


def picture_size(path: Path) -> tuple[int, int]:
    """(width, height) in pixels from the PNG header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def texts(events: list[Event], components: list[Component], title: str = PROMPT) -> list[str]:
    with draw.drawing():
        return [t.get_text() for t in draw.figure(events, components, title).axes[0].texts]


@pytest.mark.usefixtures("strict", "no_cjk")
def test_without_a_cjk_font_the_picture_is_drawn_without_a_warning(tmp_path: Path) -> None:
    draw.sequence_diagram(ONE, HOPS, tmp_path / "a.png", PROMPT)
    width, height = picture_size(tmp_path / "a.png")
    assert width == 2000
    assert 600 < height < 1200


@pytest.mark.usefixtures("strict", "only_simhei")
def test_with_a_font_that_was_installed_after_matplotlib_looked_chinese_is_drawn(tmp_path: Path) -> None:
    assert draw.cjk_font() == "SimHei"
    draw.sequence_diagram(ONE, HOPS, tmp_path / "a.png", PROMPT)
    assert picture_size(tmp_path / "a.png")[0] == 2000
    assert {PROMPT, "'缓存'"} <= set(texts(ONE, HOPS))


@pytest.mark.usefixtures("no_cjk")
def test_without_a_cjk_font_unknown_characters_are_dots_and_unknown_tokens_their_id() -> None:
    assert draw.drawable("请 KV？", [draw.LATIN]) == "· KV·"
    assert draw.drawable("ab\ufffd", [draw.LATIN]) == "ab·"
    assert draw.token_label(Event(0, 1, "Sampler", "sample", 0, token=7, text="缓存"), [draw.LATIN]) == "7"
    assert draw.token_label(Event(0, 1, "Sampler", "sample", 0, token=7, text=" a缓"), [draw.LATIN]) == "7 ' a·'"
    assert draw.token_label(Event(0, 1, "Detokenizer", "push", 0, text="缓存"), [draw.LATIN]) == "'··'"
    assert "缓" not in "".join(texts(ONE, HOPS))


@pytest.mark.usefixtures("only_simhei")
def test_a_cjk_font_serves_cjk_only_and_emoji_stay_dots() -> None:
    assert draw.drawable("KV 缓存 🙂", draw.families()) == "KV 缓存 ·"


def test_the_arrows_name_action_state_lengths_token_and_duration() -> None:
    drawn = texts([*ONE, Event(1, 3, "LLM", "x", 0, dur=0.0005)], HOPS)
    for text in (
        "schedule",
        "PREFILL",
        "0/9",
        "9/1",
        "42",
        "10.0 ms",
        "500 µs",
        "9 tokens",
        "2 pages",
        "(length)",
        r"'[b]\n'",
    ):
        assert text in drawn
    for text in ("step 1 · PREFILL", "Scheduler", "scheduler.py", OFFICIAL_NOTE):
        assert text in drawn
    assert "Sampler" not in drawn  # took no part


def test_a_state_is_written_where_it_changes_and_at_the_head_of_a_band() -> None:
    steps = [Event(i, 1 + i // 3, "Scheduler", f"a{i}", 0, state="DECODE") for i in range(6)]
    steps.append(Event(6, 2, "Scheduler", "a6", 0, state="FINISHED"))
    drawn = [t for t in texts(steps, HOPS) if t.startswith("a") or t in ("DECODE", "FINISHED")]
    assert drawn[:10] == ["a0", "DECODE", "a1", "a2", "a3", "DECODE", "a4", "a5", "a6", "FINISHED"]


def test_rows_name_their_request_only_where_there_are_several() -> None:
    assert "#0" not in texts(ONE, HOPS)
    assert {"#0", "#5"} <= set(texts([*ONE, Event(0.03, 3, "LLM", "submit", 5)], HOPS))


@pytest.mark.usefixtures("strict", "no_cjk")
def test_ten_components_and_eight_steps_fit_without_overlapping_texts() -> None:
    more = ("Server", "PrefixCache", "KVCache", "SpeculativeProposer")
    extra = [Component(n, f"{n.lower()}.py", f"some_folder/{n.lower()}_pool.py") for n in more]
    events = [Event(0, 0, c.name, "receive", 0, text="a text that is far too long to be shown whole") for c in extra]
    events += [*ONE, *[replace(e, step=e.step + 2, text="some text") for e in long_trace(6)]]
    events += [Event(9, 9, HOPS[-1].name, "sample", 0, token=12345, text="long " * 9, note="on the last lifeline")]
    hops = [*extra, *HOPS]
    with draw.drawing():
        figure = draw.figure(events, hops, "t" * 300)
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        boxes = {t: t.get_window_extent(renderer) for t in figure.axes[0].texts if t.get_text()}
    page, names = figure.bbox, {c.name for c in hops}
    assert len(names) == 10
    heads = [box for t, box in boxes.items() if t.get_text() in names]
    assert len(heads) == 10
    room = (page.width - draw.GUTTER * draw.DPI) / 10 - 20
    assert max(box.width for box in heads) < room  # each inside its own header box
    for t, box in boxes.items():
        assert page.x0 <= box.x0 <= box.x1 <= page.x1, t
        assert page.y0 <= box.y0 <= box.y1 <= page.y1, t
    bad = [(a.get_text(), b.get_text()) for a, b in combinations(boxes, 2) if overlap(boxes[a], boxes[b])]
    assert bad == []


def overlap(a: object, b: object) -> bool:
    """True where two boxes share more than a pixel both ways (lines of text may touch)."""
    wide = min(a.x1, b.x1) - max(a.x0, b.x0)
    high = min(a.y1, b.y1) - max(a.y0, b.y0)
    return wide > 1 and high > 1


def test_drawing_leaves_no_setting_behind(tmp_path: Path) -> None:
    settings, level = dict(matplotlib.rcParams), logging.getLogger("matplotlib.font_manager").level
    draw.sequence_diagram(ONE[:4], HOPS, tmp_path / "a.png", "title")
    assert dict(matplotlib.rcParams) == settings
    assert logging.getLogger("matplotlib.font_manager").level == level


def test_what_a_model_says_is_no_formula() -> None:
    with draw.drawing():
        drawn = draw.figure([Event(0, 0, "LLM", "submit", 0, text="$x^2$")], HOPS, "$y^2$").axes[0].texts
    assert {"$y^2$", "'$x^2$'"} <= {t.get_text() for t in drawn}
    assert not any(t.get_parse_math() for t in drawn)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no events"):
        draw.sequence_diagram([], HOPS, tmp_path / "a.png", "title")
