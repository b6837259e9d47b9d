"""The chapters as pages for a browser: each beside its parent, with notes on its objects in the margin.

Nothing is loaded from elsewhere: the folder holds the pages and one style sheet, and can be read offline.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from common.chapter_align import Pair, colours, edited, pairs
from common.chapter_diff import lesson, lineage
from common.chapter_objects import ObjectChange, objects, official_files
from common.chapter_tree import Chapter, FileChange

STYLE = Path(__file__).parent / "data" / "chapters.css"
CONTEXT = 3  # unchanged lines around a change
OFFICIAL = "Official files are below python/minisgl, named as at commit 20fcd7f of March 2026."


@dataclass(frozen=True)
class Side:
    """One version of a file: its lines, and how they are coloured."""

    lines: list[str]
    colours: dict[int, list[tuple[int, int, str]]]

    @staticmethod
    def of(lines: list[str], python: bool) -> Side:
        return Side([line.rstrip("\n") for line in lines], colours("".join(lines)) if python else {})

    def html(self, number: int, marks: list[tuple[int, int]]) -> str:
        """Line `number` (from 1), escaped, with spans; `marks` are the parts that changed."""
        text = self.lines[number - 1]
        looks = [""] * len(text)
        for start, end, kind in self.colours.get(number, ()):
            looks[start:end] = [kind] * len(looks[start:end])
        for start, end in marks:
            looks[start:end] = [f"{look} m".strip() for look in looks[start:end]]
        parts = groupby(zip(text, looks, strict=True), key=lambda item: item[1])
        return "".join(
            f'<span class="{look}">{content}</span>' if look else content
            for look, content in ((look, escape("".join(char for char, _ in items))) for look, items in parts)
        )


def write_pages(root: Path, chapters: list[Chapter], out: Path) -> list[Path]:
    """Write index.html, a page per chapter and the style sheet into `out`; returns the pages. Raises ChapterError."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(STYLE, out / "chapters.css")
    changed = {chapter.name: lesson(chapters, chapter) for chapter in chapters}
    pages = {out / "index.html": _index(chapters, changed)}
    official = official_files(root)
    for at, chapter in enumerate(chapters):
        notes = objects(root, chapters, chapter)
        beside = (chapters[at - 1] if at else None, chapters[at + 1] if at + 1 < len(chapters) else None)
        pages[out / f"{chapter.name}.html"] = _chapter(chapter, changed[chapter.name], notes, official, beside)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return list(pages)


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="stylesheet" href="chapters.css">\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def anchor(path: str) -> str:
    """The id of a file's section."""
    return path.replace("/", "-")


# ---- the index


def _index(chapters: list[Chapter], changed: dict[str, list[FileChange]]) -> str:
    rows = []
    for chapter in chapters:
        counted = [change for change in changed[chapter.name] if change.counted]
        added, removed = (sum(getattr(change, key) for change in counted) for key in ("added", "removed"))
        rows.append(
            f'<tr><td><a href="{chapter.name}.html">{chapter.name}</a></td>'
            f'<td>{escape(chapter.title)}<br><span lang="zh">{escape(chapter.title_zh)}</span></td>'
            f"<td>{escape(chapter.mechanism)}</td>"
            f'<td class="size"><ins>+{added}</ins> <del>−{removed}</del></td>'
            f'<td class="size">{chapter.budget or ""}</td></tr>'
        )
    body = (
        "<header><h1>The engine, chapter by chapter</h1>"
        "<p>Each chapter is a complete engine: a copy of its parent with one mechanism more. Its page shows what that took, "
        "in reading order, beside the parent.</p></header>\n<main class=prose>\n"
        "<table class=chapters><thead><tr><th>chapter<th>title<th>mechanism<th>lines of Python<th>budget</tr></thead>\n"
        f"<tbody>{''.join(rows)}</tbody></table>\n<h2>Lineage</h2>\n"
        "<p>A letter is a version of a file: the same one where a chapter keeps its parent's byte by byte, the next one where "
        "it changes the file. Letters of changed files lead to the change.</p>\n"
        f"{_lineage(chapters, changed)}\n</main>"
    )
    return _page("The engine, chapter by chapter", body)


def _lineage(chapters: list[Chapter], changed: dict[str, list[FileChange]]) -> str:
    header, rows = lineage(chapters)
    head = "".join(f'<th><a href="{c.name}.html">{text}</a></th>' for c, text in zip(chapters, header[1:], strict=True))
    text = []
    for file, *letters in rows:
        cells = []
        for chapter, letter in zip(chapters, letters, strict=True):
            if any(change.path == file for change in changed[chapter.name]):
                cells.append(f'<td class=new><a href="{chapter.name}.html#{anchor(file)}">{letter}</a></td>')
            else:
                cells.append(f"<td>{letter}</td>")
        text.append(f"<tr><th>{escape(file)}</th>{''.join(cells)}</tr>")
    return f"<table class=lineage><thead><tr><th></th>{head}</tr></thead>\n<tbody>{''.join(text)}</tbody></table>"


# ---- a chapter


def _chapter(
    chapter: Chapter,
    changed: list[FileChange],
    notes: list[ObjectChange],
    official: dict[str, str],
    beside: tuple[Chapter | None, Chapter | None],
) -> str:
    links = ['<a href="index.html">all chapters</a>']
    for other, text in zip(beside, ("← {}", "{} →"), strict=True):
        if other:
            links.append(f'<a href="{other.name}.html">{text.format(other.name)}</a>')
    contents = "".join(
        f'<li><a href="#{anchor(change.path)}">{escape(change.path)}</a> {_size(change)}</li>' for change in changed
    )
    parent = f"beside {chapter.parent}" if chapter.parent else "the first chapter: every line is an addition"
    body = (
        f"<nav>{' '.join(links)}</nav>\n<header><h1>{chapter.name}: {escape(chapter.title)} "
        f'<span lang="zh">{escape(chapter.title_zh)}</span></h1>'
        f"<p>{escape(chapter.mechanism)} — {parent}.</p>\n<ol class=contents>{contents}</ol></header>\n<main>\n"
        + "\n".join(_file(chapter, change, notes, official.get(change.path, "")) for change in changed)
        + f"\n</main>\n<footer>{OFFICIAL}</footer>\n<nav>{' '.join(links)}</nav>"
    )
    return _page(f"{chapter.name}: {chapter.title}", body)


def _size(change: FileChange) -> str:
    rest = "" if change.counted else " · not counted"
    return f"<small>{change.kind} <ins>+{change.added}</ins> <del>−{change.removed}</del>{rest}</small>"


def _file(chapter: Chapter, change: FileChange, notes: list[ObjectChange], official: str) -> str:
    counterpart = f"<p>official: {escape(official)}</p>" if official else ""
    if not change.before and not change.after:
        rows = ""
    else:
        rows = "\n".join(_rows(change, [note for note in notes if _is_in(note, chapter, change)]))
    kind = "two" if change.kind == "modified" else "one"
    columns = '<col class="no"><col class="code">' * (2 if kind == "two" else 1) + '<col class="note">'
    return (
        f'<section id="{anchor(change.path)}"><h2>{escape(change.path)} {_size(change)}</h2>{counterpart}\n'
        f'<table class="diff {kind}"><colgroup>{columns}</colgroup><tbody>\n{rows}\n</tbody></table></section>'
    )


def _is_in(note: ObjectChange, chapter: Chapter, change: FileChange) -> bool:
    return note.place.rpartition(":")[0] == f"{chapter.name}/{change.path}"


def _rows(change: FileChange, notes: list[ObjectChange]) -> list[str]:
    """The table rows of a file: changed lines with their surroundings; all lines of a file that was added or removed."""
    python = change.path.endswith(".py")
    old, new = Side.of(change.before, python), Side.of(change.after, python)
    both = change.kind == "modified"
    found = list(pairs(change.before, change.after))
    shown = {i + step for i, pair in enumerate(found) if pair.changed for step in range(-CONTEXT, CONTEXT + 1)}
    places = {i for i, pair in enumerate(found) if pair.new and any(_line(note) == pair.new for note in notes)}
    shown |= places  # the head of what changed is always there
    shown |= {i for i in range(len(found)) if {i - 1, i + 1} <= shown}  # a line takes no more room than its absence
    waiting = sorted(notes, key=_line)
    rows: list[str] = []
    stretch: list[tuple[str, str]] = []  # rows that belong to one note
    last = -1
    for i, pair in enumerate(found):
        if i not in shown:
            continue
        if i > last + 1:
            rows += [*_noted(stretch), _gap(i - last - 1, both)]
            stretch = []
        last, margin = i, ""
        while waiting and pair.new is not None and _line(waiting[0]) <= pair.new:
            margin += _note(waiting.pop(0))
        if margin:
            rows += _noted(stretch)
            stretch = []
        stretch.append((_code(pair, old, new, both), margin))
    rows += _noted(stretch)
    if last + 1 < len(found):
        rows.append(_gap(len(found) - last - 1, both))
    return rows


def _noted(stretch: list[tuple[str, str]]) -> list[str]:
    """Rows (code, note) with one cell of the margin beside all of them, so that a note pushes no lines apart."""
    return [
        f"<tr>{code}</tr>" if i else f'<tr>{code}<td class=note rowspan="{len(stretch)}">{note}</td></tr>'
        for i, (code, note) in enumerate(stretch)
    ]


def _line(note: ObjectChange) -> int:
    return int(note.place.rpartition(":")[2])


def _note(note: ObjectChange) -> str:
    purpose = f"<br>{escape(note.purpose.replace('``', ''))}" if note.purpose else ""
    return f"<p><b>{escape(note.name)}</b> <i>{note.kind} {note.change}</i>{purpose}</p>"


def _gap(count: int, both: bool) -> str:
    lines = "line" if count == 1 else "lines"
    return f'<tr class="gap"><td colspan="{5 if both else 3}">⋯ {count} unchanged {lines}</td></tr>'


def _code(pair: Pair, old: Side, new: Side, both: bool) -> str:
    marks: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    if pair.changed and pair.old and pair.new:
        marks = edited(old.lines[pair.old - 1], new.lines[pair.new - 1])
    cells = ""
    if both or pair.old:
        cells += _cell(old, pair.old, marks[0], "del" if pair.changed else "")
    if both or pair.new:
        cells += _cell(new, pair.new, marks[1], "ins" if pair.changed else "")
    return cells


def _cell(side: Side, number: int | None, marks: list[tuple[int, int]], look: str) -> str:
    if number is None:
        return '<td class="no"></td><td class="none"></td>'
    text = side.lines[number - 1]
    indent = len(text) - len(text.lstrip())
    code = side.html(number, marks)
    return f'<td class="no">{number}</td><td class="code {look}" style="--in:{indent}">{code}</td>'
