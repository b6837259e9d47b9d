"""What `python -m common.compare` measures: which engines, on which workloads, in which order.

Chapters are found by their chapter.toml and judged by their files, so that a folder that comes into being takes part.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.chapter_tree import Chapter, ChapterError, find, folders, load
from common.workloads import Workload, encode_texts, get

RECOMPUTED = ("latency",)  # workloads that a chapter without a KV cache can finish in reasonable time
SPECULATED = ("edit",)  # where a speculating variant of a chapter runs too
FULL = ("latency", "offline", "shared_prefix", "online", "multi_turn", "edit")
QUICK: dict[str, tuple[float, float]] = {  # (scale, length scale)
    "latency": (1.0, 0.25),
    "offline": (0.125, 0.25),
    "shared_prefix": (0.125, 0.5),
    "edit": (0.125, 1.0),
}


@dataclass(frozen=True)
class Entry:
    """One row of the comparison. Its name has neither blanks nor dots: documents address results by it.

    `kind`: "engine" (`package` is a chapter or a peer of common.engines, in a worker process), "server" (a chapter's
    server, loaded over HTTP), or "url" (a server of somebody else's). `only` are the workloads it takes part in, all
    if empty. `python` is a peer's interpreter, `command` starts the server behind `url`; neither gets into a result.
    """

    name: str
    package: str
    kind: str = "engine"
    options: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    note: str = ""
    python: str = ""
    url: str = ""
    command: tuple[str, ...] = ()

    @property
    def is_chapter(self) -> bool:
        return self.package.startswith("ch") and self.kind != "url"

    def takes(self, workload: Workload) -> bool:
        """Conversations need the token ids of answers, which do not come over HTTP."""
        if workload.conversations and self.kind != "engine":
            return False
        return not self.only or workload.name in self.only

    def record(self) -> dict[str, Any]:
        """What of it belongs into a result: nothing that names a place on this machine."""
        known = asdict(self)
        known["options"] = {
            k: Path(v).name if k == "model" and Path(v).is_absolute() else v for k, v in self.options.items()
        }
        return {key: known[key] for key in ("package", "kind", "options", "only", "note")}


@dataclass(frozen=True)
class Session:
    """One process of one engine: it is opened, runs these workloads in turn, and is closed."""

    entry: Entry
    workloads: tuple[Workload, ...]
    round: int


def chapters(root: Path, wanted: Sequence[str] = ()) -> tuple[list[Chapter], list[str]]:
    """The chapters to compare (all, or those called 4, ch04, …) that have a model, and a line for each left out.

    Raises ChapterError for an unknown name. A folder whose chapter.toml cannot be read is left out, not an error,
    unless it was asked for.
    """
    known: list[Chapter] = []
    notes: list[str] = []
    for folder in folders(root):
        if not (folder / "chapter.toml").is_file():
            continue
        try:
            known.append(load(folder))
        except ChapterError as error:
            notes.append(f"{folder.name} is left out: {error}")
    chosen = [find(known, text) for text in wanted] if wanted else known
    without = [c for c in chosen if not (c.folder / "model.py").is_file()]
    notes += [f"{c.name} is left out: it has no model, so there is nothing to measure" for c in without]
    return [c for c in dict.fromkeys(chosen) if c not in without], notes


def entries(found: Sequence[Chapter], options: dict[str, Any], http: bool = False) -> list[Entry]:
    """One engine per chapter, one more per chapter that can speculate, with `http` one more per chapter that serves."""
    rows: list[Entry] = []
    for chapter in found:
        short = chapter.name[:4]
        if not (chapter.folder / "kvcache.py").is_file():
            note = f"{', '.join(RECOMPUTED)} only: it computes the whole history again for every token"
            rows.append(Entry(short, chapter.name, options=options, only=RECOMPUTED, note=note))
            continue
        rows.append(Entry(short, chapter.name, options=options))
        if can_speculate(chapter.name):
            more = options | {"speculative": "ngram"}
            rows.append(Entry(f"{short}-ngram", chapter.name, options=more, only=SPECULATED, note="n-gram speculation"))
        if http and (chapter.folder / "serve.py").is_file():
            rows.append(Entry(f"{short}-http", chapter.name, "server", options, note="its server, over HTTP"))
    return rows


def can_speculate(package: str) -> bool:
    """Whether the chapter's options offer n-gram speculation."""
    try:
        fields = importlib.import_module(f"{package}.config").EngineConfig.__dataclass_fields__
    except Exception:  # a folder in the middle of an edit: the run itself will say what is wrong with it
        return False
    offered = fields["speculative"].metadata.get("choices") if "speculative" in fields else None
    return "ngram" in (offered or ())


def variant(text: str, found: Sequence[Chapter], options: dict[str, Any]) -> Entry:
    """The row for CHAPTER:KEY=VALUE[,KEY=VALUE…]. Raises ValueError for another form and ChapterError."""
    name, colon, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")]
    if not colon or any(not key or not equals for key, equals, _ in pairs):
        raise ValueError(f"a variant is CHAPTER:KEY=VALUE,… and not {text!r}")
    chapter = find(list(found), name)
    more = {key.replace("-", "_"): _value(value) for key, _, value in pairs}
    label = "-".join(value if key == "speculative" else f"{key}={value}" for key, _, value in pairs)
    return Entry(plain_name(f"{chapter.name[:4]}-{label}"), chapter.name, options=options | more)


def plain_name(text: str) -> str:
    """The text as a row may be called."""
    return re.sub(r"[^\w=-]+", "-", text)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def workloads(
    names: Sequence[str], model: str, vocab_size: int, *, quick: bool, scale: float = 1.0, length_scale: float = 1.0
) -> list[Workload]:
    """The workloads to run, their texts encoded for the model: by name, or those that a comparison has by default.

    Raises ValueError for a workload of texts that is asked for with a model that has no chat template.
    """
    chosen = list(names) or list(QUICK if quick else FULL)
    out = []
    for name in dict.fromkeys(chosen):
        some, lengths = QUICK.get(name, (0.125, 1.0)) if quick else (1.0, 1.0)
        work = get(name, vocab_size, scale * some, length_scale=length_scale * lengths)
        try:
            out.append(encode_texts(work, model))
        except ValueError:
            if names:
                raise
    return out


def warmup(vocab_size: int, length_scale: float = 1.0) -> Workload:
    """A few short requests that have nothing in common with what is measured."""
    return get("offline", vocab_size, 4 / 64, seed=99, length_scale=0.25 * length_scale)


def sessions(rows: Sequence[Entry], works: Sequence[Workload], rounds: int, together: bool) -> list[Session]:
    """Every row takes each workload once per round; the rows go forth in one round and back in the next (ABBA…).

    A process runs one workload, so that its memory and what lies in its caches are of that workload alone; `together`,
    for quick looks, gives it all of them, which saves most of the starting.
    """
    groups = [tuple(works)] if together else [(work,) for work in works]
    out = []
    for some in groups:
        for i in range(rounds):
            for row in rows if i % 2 == 0 else reversed(rows):
                taken = tuple(work for work in some if row.takes(work))
                if taken:
                    out.append(Session(row, taken, i))
    return out
