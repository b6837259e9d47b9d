"""The chapter tool: `python -m common.chapters COMMAND`. See what a chapter changes, and keep the copies honest.

list [--markdown]         chapter, parent, mechanism, lines of Python: in all, added, removed, and the budget
check                     all rules; one line per violation, exit status 1 if there is one
diff 06 [--stat]          parent → chapter in reading order, or its size per file against the budget
lineage [--markdown]      file × chapter matrix with version letters
objects 06 [--markdown]   classes, methods and functions added or changed, with their official counterparts
forward PATH...           carry an edit of an early chapter to the later ones
html [--out DIR]          side-by-side pages of all chapters for a browser, readable offline
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import NoReturn

from common.chapter_check import check
from common.chapter_diff import lesson, lineage, stat, unified
from common.chapter_forward import forward
from common.chapter_html import write_pages
from common.chapter_objects import objects
from common.chapter_tree import Chapter, ChapterError, find, is_free, lines, load_all

ROOT = Path(__file__).resolve().parent.parent


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage block."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser(
        prog="python -m common.chapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list")
    commands.add_parser("check")
    diff = commands.add_parser("diff")
    diff.add_argument("chapter", help="06, ch06 or the folder's name")
    diff.add_argument("--stat", action="store_true", help="sizes only")
    matrix = commands.add_parser("lineage")
    for command in (listing, matrix):
        command.add_argument("--markdown", action="store_true")
        command.add_argument("--chinese", action="store_true", help="heads and mechanisms in Chinese")
    changed = commands.add_parser("objects")
    changed.add_argument("chapter", help="06, ch06 or the folder's name")
    changed.add_argument("--markdown", action="store_true")
    carry = commands.add_parser("forward")
    carry.add_argument("paths", nargs="+", metavar="PATH", help="edited file, as in ch04_kvcache/scheduler.py")
    carry.add_argument("--from", dest="source", metavar="CHAPTER", help="the chapter of PATHs given without one")
    carry.add_argument(
        "--base", type=Path, metavar="FILE", help="version before the edit (default: that of git's HEAD)"
    )
    carry.add_argument("--dry-run", action="store_true", help="say what would happen, write nothing")
    pages = commands.add_parser("html")
    pages.add_argument("--out", type=Path, metavar="DIR", help="folder for the pages (default: build/html)")
    return top


def table(header: Sequence[str], rows: list[list[str]], markdown: bool = False) -> list[str]:
    """Lines of an aligned text table, or of a Markdown one."""
    if markdown:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in [list(header), ["---"] * len(header), *rows]]
        return [f"| {' | '.join(row)} |" for row in cells]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]


def _list(chapters: list[Chapter], markdown: bool, chinese: bool) -> list[str]:
    header = ["chapter", "parent", "mechanism", "lines", "added", "removed", "budget"]
    if chinese:
        header = ["章", "父章", "机制", "行数", "增加", "删除", "上限"]
    rows = []
    for chapter in chapters:
        sources = [file for file in chapter.files if file.endswith(".py") and not is_free(file)]
        count = sum(len(lines(chapter.text(file))) for file in sources)
        counted = [change for change in lesson(chapters, chapter) if change.counted]
        sizes = [count, *(sum(getattr(change, key) for change in counted) for key in ("added", "removed"))]
        words = [chapter.name, chapter.parent or "-", chapter.mechanism_zh if chinese else chapter.mechanism]
        rows.append([*words, *map(str, sizes), str(chapter.budget or "-")])
    return table(header, rows, markdown)


def _check(root: Path) -> int:
    problems = check(root)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} violations" if problems else "no violations", file=sys.stderr)
    return 1 if problems else 0


def _forward(root: Path, chapters: list[Chapter], args: argparse.Namespace) -> int:
    paths: list[str] = args.paths
    if args.source:
        source = find(chapters, args.source).name
        paths = [path if path.startswith(f"{source}/") else f"{source}/{path}" for path in paths]
    result = forward(root, chapters, paths, args.base)
    if not args.dry_run:
        result.save()
    for path, status in result.log:
        print(f"{status:<9}  {path}")
    for path in result.conflicts:
        print(
            f"{path}: left as it is; put the result of {path}.merge into it, delete that, "
            f"then run: python -m common.chapters forward {path}"
        )
    if result.later:
        names = " or ".join(name[:4] for name in result.later)
        print(f"test {' '.join(result.later)}: python -m pytest tests -k '{names}'")
    return 1 if result.conflicts else 0


def _html(root: Path, chapters: list[Chapter], out: Path) -> int:
    try:
        pages = write_pages(root, chapters, out)
    except OSError as error:
        raise ChapterError(f"cannot write {out}: {error.strerror or error}") from None
    print(f"wrote {len(pages)} pages; open {pages[0]}")
    return 0


def run(root: Path, args: argparse.Namespace) -> int:
    """Do one command; returns the exit status. Raises ChapterError."""
    if args.command == "check":
        return _check(root)
    chapters = load_all(root)
    if args.command == "forward":
        return _forward(root, chapters, args)
    if args.command == "html":
        return _html(root, chapters, args.out or root / "build" / "html")
    if args.command == "list":
        text = _list(chapters, args.markdown, args.chinese)
    elif args.command == "lineage":
        header, rows = lineage(chapters)
        text = table(["文件" if args.chinese else header[0], *header[1:]], rows, markdown=args.markdown)
    elif args.command == "objects":
        rows = [list(astuple(item)) for item in objects(root, chapters, find(chapters, args.chapter))]
        text = table(["kind", "name", "change", "place", "purpose", "official"], rows, args.markdown)
    elif args.stat:
        text = stat(chapters, find(chapters, args.chapter))
    else:
        text = [line.removesuffix("\n") for line in unified(chapters, find(chapters, args.chapter))]
    print("\n".join(text), flush=True)
    return 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Entry point; returns the exit status: 0, 1 for violations and conflicts, 2 for a request that makes no sense."""
    args = parser().parse_args(argv)
    try:
        return run(root, args)
    except ChapterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe (head, less) left; Python must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
