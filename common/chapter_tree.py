"""Chapter folders as data: what chapter.toml says, which files there are, how a chapter differs from its parent.

Nothing here judges; the rules are in `chapter_check`. Every function takes the root explicitly, so that a small tree
in a temporary folder is as good as the repository.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

NAME = re.compile(r"ch(\d\d)_\w+")
BUDGETS = {2: 700, 3: 700, 4: 200, 5: 900, 6: 350, 7: 1000, 8: 350, 9: 700, 10: 500}
FREE = ("README*.md", "chapter.toml", "bench.py")
IGNORED = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".ipynb_checkpoints", ".DS_Store"}
LAYERS = {
    "interface": "__init__ config llm generate trace tokenizer protocol frontend exchange server serve supervisor",
    "orchestration": "core message scheduler",
    "execution": "engine model_runner scripted model layers ops weights sampler attention kernels graph distributed speculative "
    "draft",
    "state & memory": "kvcache radix",
}
READING_ORDER = [f"{module}.py" for modules in LAYERS.values() for module in modules.split()]
TYPES = {
    **dict.fromkeys(("parent", "title", "title_zh", "mechanism", "mechanism_zh"), str),
    "budget": int,
    **dict.fromkeys(("added", "modified", "removed", "order"), list),
}


@dataclass(frozen=True)
class Problem:
    """One violation: where, what is wrong, what to do."""

    path: str
    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.todo}"


class ChapterError(ValueError):
    """A request or a chapter.toml that makes no sense; its one argument, a line or a Problem, says what to do."""


@dataclass(frozen=True)
class Chapter:
    """One chapter folder. Lists hold paths relative to the folder; `parent` is "" for the first chapter."""

    folder: Path
    parent: str
    title: str
    title_zh: str
    mechanism: str
    mechanism_zh: str  # in Chinese; the English one where the file has none
    budget: int | None
    added: tuple[str, ...]
    modified: tuple[str, ...]
    removed: tuple[str, ...]
    order: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def number(self) -> int:
        return int(self.name[2:4])

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Relative paths of all files, read once; symlinks are in it, caches are not."""
        return tuple(sorted(path.relative_to(self.folder).as_posix() for path in walk(self.folder)))

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    def text(self, file: str) -> str:
        return self.read(file).decode(errors="replace")


@dataclass(frozen=True)
class FileChange:
    """One file of a chapter against its parent's.

    `kind` is "added", "modified" or "removed"; `before` and `after` are lines with their line ends, [] where there is
    no file; `added` and `removed` count lines.
    """

    path: str
    kind: str
    before: list[str]
    after: list[str]
    added: int
    removed: int

    @property
    def free(self) -> bool:
        return is_free(self.path)

    @property
    def counted(self) -> bool:
        """Whether its lines count against the chapter's budget."""
        return self.path.endswith(".py") and not self.free


def is_free(file: str) -> bool:
    """Whether a file may differ from the parent's without being declared."""
    return any(fnmatchcase(file, pattern) for pattern in FREE)


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder. A symlink is yielded, never followed."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in IGNORED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path))
        else:
            yield Path(entry.path)


def lines(text: str) -> list[str]:
    """Lines with their line ends, cut at newlines only (`str.splitlines` cuts at form feeds too)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def load(folder: Path) -> Chapter:
    """Read one folder's chapter.toml. Raises ChapterError."""
    where = f"{folder.name}/chapter.toml"
    try:
        data = tomllib.loads((folder / "chapter.toml").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ChapterError(Problem(where, f"cannot be read ({error})", "write it as TOML")) from None
    for key, value in data.items():
        if key not in TYPES:
            raise ChapterError(Problem(where, f"unknown key {key!r}", f"use {', '.join(TYPES)}"))
        items = value if isinstance(value, list) else []
        if type(value) is not TYPES[key] or not all(isinstance(item, str) for item in items):
            kind = {str: "a string", int: "a whole number", list: "a list of strings"}[TYPES[key]]
            raise ChapterError(Problem(where, f"{key} is {value!r}", f"make it {kind}"))
    missing = [key for key in ("title", "title_zh", "mechanism") if not data.get(key)]
    if missing:
        raise ChapterError(Problem(where, f"no {', '.join(missing)}", "add one line for each"))
    lists = {key: tuple(data.get(key, ())) for key in ("added", "modified", "removed", "order")}
    budget = data.get("budget", BUDGETS.get(int(folder.name[2:4])))
    parent, title, title_zh, mechanism = (data.get(key, "") for key in ("parent", "title", "title_zh", "mechanism"))
    return Chapter(folder, parent, title, title_zh, mechanism, data.get("mechanism_zh") or mechanism, budget, **lists)


def folders(root: Path) -> list[Path]:
    """Folders that look like chapters, in order, with or without a chapter.toml."""
    return sorted(path for path in root.iterdir() if path.is_dir() and NAME.fullmatch(path.name))


def load_all(root: Path) -> list[Chapter]:
    """All chapters in order. Raises ChapterError for the first chapter.toml that is wrong."""
    return [load(folder) for folder in folders(root) if (folder / "chapter.toml").exists()]


def find(chapters: list[Chapter], text: str) -> Chapter:
    """The chapter called 4, 04, ch04 or by its full name. Raises ChapterError."""
    short = re.fullmatch(r"(?:ch)?(\d{1,2})", text)
    for chapter in chapters:
        if chapter.name == text.rstrip("/") or (short and int(short[1]) == chapter.number):
            return chapter
    names = ", ".join(chapter.name for chapter in chapters)
    raise ChapterError(f"unknown chapter {text!r}; choose from {names or '(none exists)'}")


def parent_of(chapters: list[Chapter], chapter: Chapter) -> Chapter | None:
    """The parent, None for the first chapter. Raises ChapterError if the parent named does not exist."""
    return find(chapters, chapter.parent) if chapter.parent else None


def children_of(chapters: list[Chapter], chapter: Chapter) -> list[Chapter]:
    """Chapters copied from this one. A child has the larger number, so following children always ends."""
    return [c for c in chapters if c.parent == chapter.name and c.number > chapter.number]


def descendants_of(chapters: list[Chapter], chapter: Chapter) -> list[Chapter]:
    found = [d for child in children_of(chapters, chapter) for d in (child, *descendants_of(chapters, child))]
    return sorted(found, key=lambda c: c.number)


def in_reading_order(files: Iterable[str], first: tuple[str, ...] = ()) -> list[str]:
    """Sort files: those in `first`, then the rest layer by layer, unknown names after that, free files last."""
    ranks = {file: rank for rank, file in reversed(list(enumerate([*first, *READING_ORDER])))}
    return sorted(files, key=lambda file: (is_free(file) and file not in first, ranks.get(file, len(ranks) + 99), file))


def compare(path: str, before: str | None, after: str | None) -> FileChange:
    """The change of one file as git counts it: a modified line is one removed and one added. None: no such file."""
    old, new = lines(before or ""), lines(after or "")
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks() if old and new else []
    same = sum(block.size for block in blocks)
    kind = "added" if before is None else "removed" if after is None else "modified"
    return FileChange(path, kind, old, new, len(new) - same, len(old) - same)


def changes(parent: Chapter | None, chapter: Chapter) -> list[FileChange]:
    """All files that differ from the parent's, free ones too, in reading order. Without a parent all are added."""
    old, new = set(parent.files if parent else ()), set(chapter.files)
    found = []
    for file in in_reading_order(old | new, chapter.order):
        if parent and file in old & new and parent.read(file) == chapter.read(file):
            continue
        before = parent.text(file) if parent and file in old else None
        found.append(compare(file, before, chapter.text(file) if file in new else None))
    return found
