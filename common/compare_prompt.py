"""Two chapters on one prompt, next to each other: tokens, counters, and the trace hop by hop."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.harness import ROOT
from common.trace import Event, short, summary

WIDTH = 120


def show(packages: Sequence[str], prompt: str, max_tokens: int, options: dict[str, Any]) -> None:
    """Run the prompt through both, each in a process of its own, and print the comparison. ValueError if one fails."""
    seen = []
    for package in packages:
        print(f"{package}: {short(prompt, 60)}", file=sys.stderr)
        seen.append(_follow(package, prompt, max_tokens, options))
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    names = [package[:4] for package in packages]
    console.print(Text(f"{packages[0]} and {packages[1]}: {prompt}", style="bold"))
    for made in (tokens(names, seen), counters(names, seen), trace(names, seen)):
        console.print(made)


def _follow(package: str, prompt: str, max_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    command = {"cmd": "follow", "engine": package, "options": options, "prompt": prompt, "max_tokens": max_tokens}
    done = subprocess.run(
        [sys.executable, "-m", "common.worker"], input=json.dumps(command), capture_output=True, text=True, cwd=ROOT
    )
    answer: dict[str, Any] = (
        json.loads(done.stdout) if done.stdout else {"ok": False, "error": f"it died ({done.returncode})"}
    )
    if not answer["ok"]:
        raise ValueError(f"{package}: {answer['error']}")
    return answer["seen"]


def tokens(names: Sequence[str], seen: Sequence[dict[str, Any]]) -> Table:
    """The output token by token, and where the two part."""
    out = _table("output", "", *names, "")
    rows = [list(zip(one["output"]["token_ids"], one["text_of"], strict=True)) for one in seen]
    for i in range(max(map(len, rows))):
        cells = [f"{row[i][0]} '{short(row[i][1], 24)}'" if i < len(row) else "–" for row in rows]
        same = all(i < len(row) for row in rows) and rows[0][i][0] == rows[1][i][0]
        out.add_row(str(i + 1), *map(Text, cells), Text("=" if same else "≠", style="" if same else "bold red"))
    return out


def counters(names: Sequence[str], seen: Sequence[dict[str, Any]]) -> Table:
    """What each engine counted, and the times of the request; equal lines are dim, counters at 0 in both left out."""
    out = _table("counters", "", *names)
    sums = [summary([Event(**event) for event in one["events"]]) for one in seen]
    for key in dict.fromkeys(key for one in seen for key in one["stats"]):
        values = [one["stats"].get(key, 0) for one in seen]
        if any(values):
            out.add_row(key, *(f"{value:,}" for value in values), style="dim" if values[0] == values[1] else "")
    for key in ("ttft_s", "tpot_s"):
        cells = [f"{one[key] * 1e3:.2f} ms" if one[key] is not None else "–" for one in sums]
        out.add_row(f"{key.removesuffix('_s').upper()} (first request of the process)", *cells)
    return out


def trace(names: Sequence[str], seen: Sequence[dict[str, Any]]) -> Table:
    """The life of the request in both: equal hops share a line, a hop that only one has stands alone."""
    out = _table("trace (cached/extend, pages, token, ms)", "step", "hop", names[0], "hop", names[1])
    left, right = ([Event(**event) for event in one["events"]] for one in seen)
    pairs = list(align(left, right))
    step = None
    for a, b in pairs:
        now = (a or b).step  # type: ignore[union-attr]
        if step not in (None, now):
            out.add_section()
        step = now
        cells = [part for event in (a, b) for part in (_hop(event), _what(event))]
        style = "" if a and b else "bold"
        out.add_row(str(now), *(Text(cell, style=style) for cell in cells))
    return out


def align(left: Sequence[Event], right: Sequence[Event]) -> list[tuple[Event | None, Event | None]]:
    """Events of both by step, component and action, in order; None where one has no such event there."""
    ours, theirs = ([(e.step, e.component, e.action) for e in events] for events in (left, right))
    out: list[tuple[Event | None, Event | None]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            out += zip(left[a:b], right[c:d], strict=True)
        else:
            ones = [(event, None) for event in left[a:b]]
            others = [(None, event) for event in right[c:d]]
            out += sorted([*ones, *others], key=lambda pair: (pair[0] or pair[1]).step)  # type: ignore[union-attr]
    return out


def _hop(event: Event | None) -> str:
    return f"{event.component} {event.action}" if event else ""


def _what(event: Event | None) -> str:
    if event is None:
        return ""
    parts = [event.state] if event.state else []
    parts += [f"{event.cached_len}/{event.extend_len}"] if event.cached_len or event.extend_len else []
    parts += [f"p{event.pages}"] if event.pages else []
    parts += [str(event.token)] if event.token is not None else []
    parts += [f"{event.dur * 1e3:.2f} ms"] if event.dur else []
    return " ".join(parts)


def _table(title: str, *columns: str) -> Table:
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        out.add_column(column, overflow="fold")
    return out
