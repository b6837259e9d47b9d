"""The classes, methods and functions that a chapter adds or changes, with their counterparts in the official source."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.chapter_diff import lesson
from common.chapter_source import definitions, parse
from common.chapter_tree import Chapter, ChapterError


@dataclass(frozen=True)
class ObjectChange:
    """`name` is qualified within its module; `place` is path:line; `official` is "" where there is no counterpart."""

    kind: str
    name: str
    change: str
    place: str
    purpose: str
    official: str


def official_files(root: Path) -> dict[str, str]:
    """Module file -> files below the official python/minisgl, from docs/official.toml; {} without that file."""
    table = root / "docs" / "official.toml"
    if not table.exists():
        return {}
    try:
        return dict(tomllib.loads(table.read_text(encoding="utf-8")).get("files", {}))
    except ValueError as error:
        raise ChapterError(f"docs/official.toml: cannot be read ({error}); write it as TOML") from None


def objects(root: Path, chapters: list[Chapter], chapter: Chapter) -> list[ObjectChange]:
    """Everything added or changed against the parent, in reading order. Raises ChapterError.

    A class counts as changed when something outside its methods changed; its methods are listed on their own.
    """
    official = official_files(root)
    found = []
    for change in lesson(chapters, chapter):
        before, after = parse("".join(change.before)), parse("".join(change.after))
        if not change.counted or before is None or after is None:
            continue
        old = definitions(before)
        for name, (node, fingerprint) in definitions(after).items():
            if name in old and old[name][1] == fingerprint:
                continue
            kind = "class" if isinstance(node, ast.ClassDef) else "method" if "." in name else "function"
            purpose = (ast.get_docstring(node) or "").partition("\n")[0]
            place = f"{chapter.name}/{change.path}:{node.lineno}"
            state = "changed" if name in old else "added"
            found.append(ObjectChange(kind, name, state, place, purpose, official.get(change.path, "")))
    return found
