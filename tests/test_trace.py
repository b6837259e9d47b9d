"""What a trace says: the events, the table, the request path, the JSON forms, the summary, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from common import trace
from common.trace import Component, Event, Tracer

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


def rendered(renderable: object, width: int = 120) -> list[str]:
    console = Console(width=width, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text().splitlines()


def shown(events: list[Event], width: int = 120) -> list[str]:
    return rendered(trace.table(events, HOPS, Console(width=width)), width)


# ---- the tracer -----------------------------------------------------------------------------------------------------


def test_an_empty_tracer_is_true_because_engines_ask_if_tracer() -> None:
    assert Tracer()


def test_emit_stamps_time_and_step_and_keeps_order() -> None:
    tracer = Tracer()
    tracer.emit("LLM", "submit", 7, text="x")
    tracer.step = 3
    tracer.emit("Sampler", "sample", 7, token=0, dur=0.5)
    first, second = tracer.events
    assert (first.step, first.rid, first.text, first.token) == (0, 7, "x", None)
    assert (second.step, second.token, second.dur) == (3, 0, 0.5)
    assert 0 <= first.t <= second.t < 60


def test_a_field_that_the_schema_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        Tracer().emit("LLM", "submit", 0, colour="red")


def test_tracing_needs_neither_rich_nor_matplotlib_nor_torch_and_drawing_never_loads_pyplot(tmp_path: Path) -> None:
    code = f"""
import sys
from common import trace
assert not {{"rich", "matplotlib", "torch"}} & set(sys.modules)
from common.draw import sequence_diagram
sequence_diagram([trace.Event(0.0, 0, "LLM", "submit", 0)], [], {str(tmp_path / "a.png")!r}, "title")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(trace.__file__).parents[1])


# ---- table, path, numbers -------------------------------------------------------------------------------------------


def test_the_table_has_one_row_per_event_with_its_fields() -> None:
    lines = [line for line in shown(ONE) if line.strip()]
    header, _rule, *rows = lines
    assert " ".join(header.split()) == "step time ms component (file) action state cached/extend pages token note"
    assert len(rows) == len(ONE)
    assert rows[3].split() == ["1", "3.00", "Scheduler", "(scheduler.py)", "schedule", "PREFILL", "0/9", "2"]
    assert rows[4].split() == ["1", "13.00", "ModelRunner", "(model_runner.py)", "forward", "10.00", "ms"]
    assert rows[5].split() == ["1", "14.00", "Scheduler", "(scheduler.py)", "process", "42"]
    assert rows[11].split()[-2:] == ["FINISHED", "length"]


def test_the_table_counts_time_from_the_first_event() -> None:
    rows = [line.split() for line in shown(ONE[4:6]) if line.strip()][2:]
    assert [row[1] for row in rows] == ["0.00", "1.00"]


def test_the_table_shows_chinese_and_never_takes_text_for_markup() -> None:
    text = "\n".join(shown(ONE))
    assert "'缓存'" in text
    assert r"'[b]\n'" in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    assert max(trace.cells(line) for line in shown(ONE, width)) <= width


def test_a_narrow_console_leaves_the_files_out() -> None:
    assert "scheduler.py" not in "\n".join(shown(ONE, 100))


def test_a_second_request_adds_the_column_that_tells_them_apart() -> None:
    lines = shown([*ONE, Event(0.03, 3, "LLM", "submit", 5)], 140)
    assert "req" in lines[0].split()
    assert "req" not in shown(ONE)[0].split()


def test_short_escapes_and_cuts_by_columns() -> None:
    assert trace.short("a\nb", 9) == r"a\nb"
    assert trace.short("缓存缓存", 8) == "缓存缓存"
    assert trace.short("缓存缓存缓", 8) == "缓存缓…"


def test_the_path_names_each_hop_once_in_order_with_both_files() -> None:
    lines = rendered(
        trace.path_table([*ONE, Event(0.1, 3, "Sampler", "sample", 0), Event(0.1, 3, "Odd", "x", 0)], HOPS)
    )
    hops = [line.split() for line in lines if "↔" in line]
    assert [h[2 if "↓" in h else 1] for h in hops] == [
        "LLM", "Tokenizer", "Scheduler", "ModelRunner", "Detokenizer", "Sampler", "Odd",
    ]  # fmt: skip
    assert hops[0][3:] == ["chapter/llm.py", "↔", "llm/llm.py", "submit,", "output"]
    assert hops[5][3:6] == ["chapter/sampler.py", "↔", "none"]
    assert "?" in hops[6]


def test_the_path_says_which_commit_the_official_names_come_from() -> None:
    text = " ".join(" ".join(rendered(trace.path_table(ONE, HOPS))).split())
    assert "20fcd7f (March 2026)" in text
    assert "9a91cfa (2026-09-16)" in text


def test_summary_counts_what_was_scheduled_and_processed() -> None:
    got = trace.summary(ONE)
    assert (got["steps"], got["tokens"], got["forwarded_tokens"]) == (2, 2, 10)
    assert got["ttft_s"] == pytest.approx(0.014)
    assert got["tpot_s"] == pytest.approx(0.006)


def test_summary_of_a_request_without_tokens_has_no_times() -> None:
    assert trace.summary(ONE[:3]) == {"steps": 0, "tokens": 0, "forwarded_tokens": 0, "ttft_s": None, "tpot_s": None}


def test_chrome_trace_has_a_named_thread_per_component_and_complete_events_in_microseconds() -> None:
    whole = json.loads(json.dumps(trace.chrome_trace(ONE)))
    events = whole["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(e) for e in events)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted({e.component for e in ONE})
    timed = [e for e in events if e["ph"] in "Xi"]
    assert [names[e["tid"]] for e in timed] == [e.component for e in ONE]
    assert {e["pid"] for e in events} == {1}
    forward = timed[4]
    assert (forward["ph"], forward["ts"], forward["dur"]) == ("X", pytest.approx(3000), pytest.approx(10000))
    assert all(e["ph"] == "i" and e["s"] == "t" and "dur" not in e for e in timed if e["name"] != "forward")
    assert timed[3]["args"] == {
        "step": 1, "rid": 0, "state": "PREFILL", "length": 0, "cached_len": 0, "extend_len": 9, "pages": 2,
        "token": None, "text": "", "note": "",
    }  # fmt: skip


def test_to_json_gives_every_field() -> None:
    rows = trace.to_json(ONE)
    assert [Event(**row) for row in rows] == ONE


def test_report_prints_all_parts_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = trace.report(ONE, HOPS, out_dir=tmp_path / "new", title="[life]", as_json=False)
    out = capsys.readouterr().out
    assert out.startswith("[life]\n")
    assert "2 steps · 2 tokens · 10 forwarded tokens · TTFT 14.00 ms · TPOT 6.00 ms" in out
    assert out.count("↔") == 5
    assert written == [tmp_path / "new" / "trace.json", tmp_path / "new" / "sequence.png"]
    assert all(f"wrote {p}" in out and p.stat().st_size > 100 for p in written)
    assert json.loads(written[0].read_text("utf-8")) == trace.chrome_trace(ONE)


def test_report_as_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.report(ONE, HOPS, out_dir=None, title=PROMPT, as_json=True) == []
    whole = json.loads(capsys.readouterr().out)
    assert whole["title"] == PROMPT
    assert whole["events"] == trace.to_json(ONE)
    assert whole["path"][1] == {
        "name": "Tokenizer",
        "file": "chapter/tokenizer.py",
        "official": "tokenizer/tokenize.py",
    }
    assert whole["files"] == []
