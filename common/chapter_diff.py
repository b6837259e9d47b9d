"""What a reader sees of the chapters: the diff from parent to chapter, its size, and the lineage of every file."""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterator

from common.chapter_tree import Chapter, FileChange, changes, in_reading_order, is_free, parent_of


def lesson(chapters: list[Chapter], chapter: Chapter) -> list[FileChange]:
    """The changes that a reader reads, in reading order: all Python files, bench.py last. Raises ChapterError."""
    found = changes(parent_of(chapters, chapter), chapter)
    return [change for change in found if not change.free or change.path.endswith(".py")]


def unified(chapters: list[Chapter], chapter: Chapter) -> Iterator[str]:
    """Unified diff, line by line, with a header before each file; `patch -p2` in a copy of the parent
    makes the chapter of it."""
    for change in lesson(chapters, chapter):
        size = f"+{change.added} -{change.removed}"
        yield f"===== {change.path}: {change.kind} {size}{'' if change.counted else ' (not counted)'}\n"
        old = f"a/{chapter.parent}/{change.path}" if change.kind != "added" else "/dev/null"
        new = f"b/{chapter.name}/{change.path}" if change.kind != "removed" else "/dev/null"
        for line in difflib.unified_diff(change.before, change.after, old, new):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def stat(chapters: list[Chapter], chapter: Chapter) -> list[str]:
    """One line per file, then the totals of the counted files against the budget."""
    found = lesson(chapters, chapter)
    width = max((len(change.path) for change in found), default=0)
    text = [f"{chapter.parent or '(nothing)'} → {chapter.name}"]
    for change in found:
        note = "" if change.counted else "   (not counted)"
        text.append(f"  {change.path:<{width}}  {change.kind:<8}  {change.added:>+5}  {-change.removed:>5}{note}")
    added = sum(change.added for change in found if change.counted)
    removed = sum(change.removed for change in found if change.counted)
    share = f" ({100 * removed / added:.1f} % of added)" if added else ""
    budget = f"{chapter.budget - added} left of a budget of {chapter.budget}" if chapter.budget else "no budget"
    return [*text, f"total +{added} -{removed}{share}, {budget}"]


def lineage(chapters: list[Chapter]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the file × chapter matrix.

    A where a file first appears, the parent's letter while it is byte-identical to the parent's, the next letter when
    it changes, "·" where it is absent. Free files, which may change everywhere, are left out. Raises ChapterError.
    """
    files = {file for chapter in chapters for file in chapter.files if not is_free(file)}
    rows = []
    for file in in_reading_order(files):
        letters: dict[str, str] = {}
        unused = iter(string.ascii_uppercase)
        for chapter in chapters:
            parent = parent_of(chapters, chapter)
            if file in chapter.files:
                same = parent and file in parent.files and parent.read(file) == chapter.read(file)
                letters[chapter.name] = letters[parent.name] if parent and same else next(unused)
        rows.append([file, *(letters.get(chapter.name, "·") for chapter in chapters)])
    return ["file", *(f"ch{chapter.number:02}" for chapter in chapters)], rows
