"""Follow requests through an engine: one event schema for every chapter, shown as a table, a path, JSON and a picture.

An engine holds ``tracer: Tracer | None`` and says ``if self.tracer: self.tracer.emit(...)``, so a run without a tracer
pays one test per call site and nothing else. Everything below ``Tracer`` only reads finished events.
"""

from __future__ import annotations

import json
import sys
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is imported where it is used: engines import this module only for Tracer
    from rich.console import Console
    from rich.table import Table

OFFICIAL_NOTE = (
    "official: files under python/minisgl as named at commit 20fcd7f (March 2026), "
    "the nearest state at hand to the book's baseline 9a91cfa (2026-09-16)"
)
TABLE_WIDTH = 120
TOKEN_CELLS = 26


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a component did for one request.

    ``t`` is in seconds since the tracer was made, taken when the work was done; ``dur`` is how long it took in seconds
    (0 for an instant), so the work began at ``t - dur``. ``step`` is 0 before the first engine step. Lengths are in
    tokens, ``pages`` counts the KV pages (or slots) the request owns, ``token`` is one vocabulary id or None.
    """

    t: float
    step: int
    component: str
    action: str
    rid: int
    state: str = ""
    length: int = 0
    cached_len: int = 0
    extend_len: int = 0
    pages: int = 0
    token: int | None = None
    text: str = ""
    note: str = ""
    dur: float = 0.0


@dataclass(frozen=True, slots=True)
class Component:
    """A hop of the request path: its file here and the counterpart in the official source ("" where there is none)."""

    name: str
    file: str
    official: str = ""


COMPONENTS = (  # every hop there is, in the order of the path; an engine has those that its events name
    Component("Server", "server.py", "server/api_server.py"),
    Component("Frontend", "frontend.py", "server/api_server.py"),
    Component("LLM", "llm.py", "llm/llm.py"),
    Component("Tokenizer", "tokenizer.py", "tokenizer/tokenize.py"),
    Component("Scheduler", "scheduler.py", "scheduler/scheduler.py"),
    Component("PrefixCache", "radix.py", "kvcache/radix_cache.py"),
    Component("KVCache", "kvcache.py", "kvcache/mha_pool.py"),
    Component("Proposer", "speculative.py"),
    Component("ModelRunner", "model_runner.py", "engine/engine.py"),
    Component("Sampler", "sampler.py", "engine/sample.py"),
    Component("Detokenizer", "tokenizer.py", "tokenizer/detokenize.py"),
)


@dataclass
class Tracer:
    """Collects events in order. The engine sets ``step`` at the start of each of its steps.

    It has no ``__len__`` on purpose: ``if tracer:`` has to be true for a tracer that holds no event yet.
    """

    step: int = 0
    events: list[Event] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    def emit(self, component: str, action: str, rid: int, **fields: Any) -> None:
        """Append one event, stamped now; call it when the work is done.

        ``fields`` are those of Event after ``rid``, with its defaults: state, length, cached_len, extend_len, pages,
        token, text, note, dur (seconds). Any other name raises TypeError.
        """
        t = time.perf_counter() - self.start
        self.events.append(Event(t, self.step, component, action, rid, **fields))


def cells(text: str) -> int:
    """Columns that ``text`` takes in a terminal: wide (CJK) characters count as two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def short(text: str, limit: int) -> str:
    """``text`` on one line with control characters escaped, cut with an ellipsis to at most ``limit`` columns."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if cells(line) <= limit:
        return line
    while cells(line) > limit - 1:
        line = line[:-1]
    return line + "…"


def used_components(events: Sequence[Event], components: Sequence[Component]) -> list[Component]:
    """The components that occur in ``events``, by first appearance; one that nobody described has no files."""
    known = {c.name: c for c in components}
    names = dict.fromkeys(e.component for e in events)
    return [known.get(name, Component(name, "")) for name in names]


def lengths(event: Event) -> str:
    """``cached_len/extend_len``, or "" where the event says nothing about them."""
    return f"{event.cached_len}/{event.extend_len}" if event.cached_len or event.extend_len else ""


def remarks(event: Event) -> list[str]:
    """The event's note, and its length and duration where it has them and no column shows them."""
    parts = [short(event.note, 60)] if event.note else []
    if event.length and not lengths(event):
        parts.append(f"{event.length} tokens")
    if event.dur:
        parts.append(f"{event.dur * 1e3:.2f} ms")
    return parts


def table(events: Sequence[Event], components: Sequence[Component], console: Console) -> Table:
    """The life of the requests, one row per event and none left out, fitted to the width of ``console``.

    Times count from the first event. A column ``req`` appears with a second request. Where the columns would not fit,
    file names are left to path_table.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    several = len({e.rid for e in events}) > 1
    files = {c.name: Path(c.file).name for c in components} if console.width >= (128 if several else 110) else {}
    out = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # one blank between columns: 120 columns are few
    for name in ("step", "time ms", *(["req"] if several else [])):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("component (file)" if files else "component", no_wrap=True)
    out.add_column("action", no_wrap=True)
    out.add_column("state", no_wrap=True)
    out.add_column("cached/extend", justify="right", no_wrap=True)
    out.add_column("pages", justify="right", no_wrap=True)
    out.add_column("token", overflow="fold", max_width=TOKEN_CELLS)
    out.add_column("note", overflow="fold")
    step = None
    for e in events:
        if step not in (None, e.step):
            out.add_section()
        step = e.step
        where = Text(e.component, style="bold")
        if files.get(e.component):
            where.append(f" ({files[e.component]})", style="not bold dim")
        said = [] if e.token is None else [str(e.token)]
        said += [f"'{short(e.text, 3 * TOKEN_CELLS - 10)}'"] if e.text else []
        row = [str(e.step), f"{(e.t - events[0].t) * 1e3:.2f}", *([str(e.rid)] if several else [])]
        tail = [e.action, e.state, lengths(e), str(e.pages or ""), " ".join(said), ", ".join(remarks(e))]
        out.add_row(*row, where, *map(Text, tail))  # Text, never str: what a model says is no markup
    return out


def path_table(events: Sequence[Event], components: Sequence[Component]) -> Table:
    """The request path: each hop by first appearance, its file here ↔ the official counterpart, and what it does."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    actions: dict[str, dict[str, None]] = {}
    for e in events:
        actions.setdefault(e.component, {})[e.action] = None
    note = Text(OFFICIAL_NOTE)
    out = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=note, caption_justify="left")
    for name in ("hop", "component", "file here", "", "official file", "actions"):
        out.add_column(name, overflow="fold")
    hops = used_components(events, components)
    for i, c in enumerate(hops):
        hop = f"{i + 1} ↓" if i + 1 < len(hops) else f"{i + 1}"
        row = [hop, c.name, c.file or "?", "↔", c.official or "none", ", ".join(actions[c.name])]
        out.add_row(*map(Text, row))
    return out


def to_json(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events as plain dicts of the fields of ``Event``; times in seconds."""
    return [asdict(e) for e in events]


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Chrome trace event JSON (opens in Perfetto): one process, one thread per component, times in microseconds."""
    tids = {name: i for i, name in enumerate(dict.fromkeys(e.component for e in events), start=1)}
    out: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "engine"}}]
    for name, tid in tids.items():
        out.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}})
        out.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": tid, "args": {"sort_index": tid}})
    for e in events:
        args = asdict(e)
        for key in ("t", "dur", "component", "action"):
            del args[key]
        shown = {"name": e.action, "cat": e.state or "event", "pid": 1, "tid": tids[e.component], "args": args}
        if e.dur > 0:
            shown |= {"ph": "X", "ts": round((e.t - e.dur) * 1e6, 3), "dur": round(e.dur * 1e6, 3)}
        else:
            shown |= {"ph": "i", "ts": round(e.t * 1e6, 3), "s": "t"}
        out.append(shown)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Counters and times of a trace: steps, tokens, forwarded_tokens, ttft_s, tpot_s.

    It counts what the Scheduler says: an engine step is a step with a ``schedule`` event, whose extend_len is what the
    forward computes, unless a ``propose`` event says more; every output token has one ``process`` event with its id.
    ttft_s runs from a request's first event to its first token, tpot_s is the mean gap after that; means over the
    requests, None where there is no such token.
    Where a prefix cache was asked, hit_tokens of prompt_tokens were found there, when each request first began.
    """
    scheduled = [e for e in events if e.action == "schedule"]
    made: dict[int, list[float]] = {}
    began: dict[int, float] = {}
    for e in events:
        began.setdefault(e.rid, e.t - e.dur)
        if e.action == "process" and e.token is not None:
            made.setdefault(e.rid, []).append(e.t)
    guessed = sum(e.extend_len - 1 for e in events if e.action == "propose")
    first = [times[0] - began[rid] for rid, times in made.items()]
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in made.values() if len(times) > 1]
    asked = list({e.rid: e for e in reversed(events) if e.action == "match"}.values())  # the first of each request
    hits = {"hit_tokens": sum(e.cached_len for e in asked), "prompt_tokens": sum(e.length for e in asked)}
    return {
        "steps": len({e.step for e in scheduled}),
        "tokens": sum(map(len, made.values())),
        "forwarded_tokens": sum(e.extend_len for e in scheduled) + guessed,
        "ttft_s": sum(first) / len(first) if first else None,
        "tpot_s": sum(gaps) / len(gaps) if gaps else None,
        **(hits if asked else {}),
    }


def summary_line(events: Sequence[Event]) -> str:
    """``summary`` as one line for people."""
    s = summary(events)
    line = f"{s['steps']} steps · {s['tokens']} tokens · {s['forwarded_tokens']} forwarded tokens"
    for name in ("ttft", "tpot"):
        if s[f"{name}_s"] is not None:
            line += f" · {name.upper()} {s[f'{name}_s'] * 1e3:.2f} ms"
    if "hit_tokens" in s:
        rate = s["hit_tokens"] / s["prompt_tokens"]
        line += f" · hit rate {rate:.1%} ({s['hit_tokens']} of {s['prompt_tokens']} tokens)"
    return line


def report(
    events: Sequence[Event], components: Sequence[Component], *, out_dir: Path | None, title: str, as_json: bool
) -> list[Path]:
    """Print a trace to stdout and write ``trace.json`` (Chrome) and ``sequence.png`` under ``out_dir``.

    Prints table, path, summary and the written files, or with ``as_json`` one JSON object with all of it. ``out_dir``
    None writes nothing. Returns the written paths. Raises OSError where the folder cannot be written.
    """
    written: list[Path] = []
    if out_dir is not None:
        from common.draw import sequence_diagram

        out_dir.mkdir(parents=True, exist_ok=True)
        written = [out_dir / "trace.json", out_dir / "sequence.png"]
        written[0].write_text(json.dumps(chrome_trace(events), ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
        sequence_diagram(events, components, written[1], title)
    if as_json:
        path = [asdict(c) for c in used_components(events, components)]
        whole = {"title": title, "summary": summary(events), "path": path, "note": OFFICIAL_NOTE}
        whole |= {"events": to_json(events), "files": [str(p) for p in written]}
        print(json.dumps(whole, ensure_ascii=False))
        return written

    from rich.console import Console
    from rich.text import Text

    # rich takes 80 columns for a pipe; the table is made for 120
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    console.print(Text(title, style="bold"))
    console.print(table(events, components, console))
    console.print(path_table(events, components))
    console.print(Text(summary_line(events)), highlight=False)
    for file in written:
        print(f"wrote {file}")
    return written
