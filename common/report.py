"""Numbers in the documents come from committed results: `python -m common.report --write | --check`.

A block between `<!-- begin:NAME -->` and `<!-- end:NAME -->` (short: `<!-- end -->`) is generated, in the README*.md of
the root and its folders and in docs/*.md. NAME is one of

    table:RESULT:TABLE        tables.TABLE of docs/results/RESULT.json: {columns, rows} of finished cells, each with
                              an optional twin columns_zh, rows_zh for Chinese documents (NAME.zh.md)
    value:RESULT:KEY:FORMAT   one number: KEY a dotted path, places in lists as numbers, spaces as _; FORMAT as in Python,
                              .2f; begin and end stand in one line of text
    lineage, sizes            what `python -m common.chapters` says about the chapters

Marks in backticks or between fences are left alone. `--check` exits with 1 and names the stale blocks; a block that
cannot be made is an error, named with file and line, exit status 2.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"(?<!`)<!-- (begin|end)(?::(\S+))? -->")
COMMANDS = {"lineage": ("lineage", "--markdown"), "sizes": ("list", "--markdown")}


class ReportError(ValueError):
    """A block that cannot be rendered or read; the message starts with FILE:LINE once the place is known."""


@dataclass(frozen=True)
class Block:
    """A generated part of a document: text[start:end] is its body, `line` (from 1) the place of its begin mark."""

    name: str
    line: int
    start: int
    end: int
    inline: bool


@dataclass
class Report:
    """Renderers over one tree; each result file and each chapter command is read once."""

    root: Path
    _results: dict[str, Any] = field(default_factory=dict)
    _outputs: dict[tuple[str, bool], str] = field(default_factory=dict)

    def render(self, block: Block, chinese: bool) -> str:
        """Body of a block, with the line breaks around it. Raises ReportError."""
        kind, *rest = block.name.split(":")
        renderers: dict[str, tuple[int, Callable[..., str]]] = {
            "table": (2, lambda result, table: self._table(result, table, chinese)),
            "value": (3, self._value),
            "lineage": (0, lambda: self._chapters("lineage", chinese)),
            "sizes": (0, lambda: self._chapters("sizes", chinese)),
        }
        if kind not in renderers:
            raise ReportError(f"unknown block {block.name!r}, known are {', '.join(renderers)}")
        count, renderer = renderers[kind]
        if len(rest) != count:
            raise ReportError(f"block {block.name!r}: {kind} takes {count} parts after its name, not {len(rest)}")
        if block.inline != (kind == "value"):
            place = "in one line" if kind == "value" else "on lines of their own"
            raise ReportError(f"block {block.name!r}: begin and end of a {kind} stand {place}")
        text = renderer(*rest)
        return text if block.inline else f"\n{text.strip(chr(10))}\n"

    def _result(self, name: str) -> Any:
        if name not in self._results:
            path = self.root / "docs" / "results" / f"{name}.json"
            try:
                self._results[name] = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise ReportError(f"there is no docs/results/{name}.json") from None
            except ValueError as error:
                raise ReportError(f"docs/results/{name}.json is not JSON: {error}") from None
        return self._results[name]

    def _table(self, result: str, name: str, chinese: bool) -> str:
        table = _at(self._result(result), f"tables.{name}", result)
        columns, rows = (table.get(f"{key}_zh") if chinese else None for key in ("columns", "rows"))
        columns, rows = columns or table["columns"], rows or table["rows"]
        if any(len(row) != len(columns) for row in rows):
            raise ReportError(f"table {name!r} of docs/results/{result}.json has rows that are not {len(columns)} wide")
        # Names to the left, numbers to the right.
        rule = ["---" if place == 0 else "---:" for place in range(len(columns))]
        return "\n".join(f"| {' | '.join(_cell(c) for c in row)} |" for row in (columns, rule, *rows))

    def _value(self, result: str, key: str, spec: str) -> str:
        value = _at(self._result(result), key, result)
        if isinstance(value, dict | list) or value is None:
            raise ReportError(f"{key!r} of docs/results/{result}.json is no single value")
        try:
            return format(value, spec)
        except ValueError as error:
            raise ReportError(f"{key!r} of docs/results/{result}.json as {spec!r}: {error}") from None

    def _chapters(self, what: str, chinese: bool) -> str:
        key = (what, chinese)
        if key not in self._outputs:
            command = [sys.executable, "-m", "common.chapters", *COMMANDS[what], *["--chinese"] * chinese]
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
                raise ReportError(f"python {' '.join(command[1:])} failed: {reason}")
            self._outputs[key] = done.stdout.strip("\n")
        return self._outputs[key]


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _at(data: Any, key: str, result: str) -> Any:
    for part in key.split("."):
        try:
            key_of = part if isinstance(data, list) or part in data else part.replace("_", " ")
            data = data[int(part)] if isinstance(data, list) else data[key_of]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ReportError(f"docs/results/{result}.json has no {key!r}") from None
    return data


def find_blocks(text: str) -> list[Block]:
    """The generated blocks of a document, in order. Raises ReportError, beginning with the line, on unpaired marks."""
    blocks: list[Block] = []
    opened: tuple[str, int, int] | None = None
    fenced, offset = False, 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if opened is None and line.lstrip().startswith("```"):
            fenced = not fenced
        for mark in () if fenced else MARK.finditer(line):
            kind, name = mark.groups()
            if kind == "begin":
                if opened is not None:
                    raise ReportError(f"{number}: a block begins inside the block {opened[0]!r} of line {opened[1]}")
                opened = (name or "", number, offset + mark.end())
            elif opened is None or name not in (None, opened[0]):
                raise ReportError(f"{number}: the end of a block that did not begin: {name or 'no name'}")
            else:
                blocks.append(Block(opened[0], opened[1], opened[2], offset + mark.start(), opened[1] == number))
                opened = None
        offset += len(line)
    if opened is not None:
        raise ReportError(f"{opened[1]}: block {opened[0]!r} has no end")
    return blocks


def documents(root: Path) -> list[Path]:
    """The documents that may hold blocks: README*.md of the root and of each folder in it, and docs/*.md."""
    found = {*root.glob("README*.md"), *root.glob("[!.]*/README*.md"), *root.glob("docs/*.md")}
    return sorted(found)


def update(path: Path, report: Report) -> tuple[str, list[Block]]:
    """The document with every block made anew, and the blocks that differ. Raises ReportError naming file and line."""
    text = path.read_bytes().decode("utf-8")
    place = path.relative_to(report.root).as_posix()
    try:
        blocks = find_blocks(text)
    except ReportError as error:
        raise ReportError(f"{place}:{error}") from None
    parts, at, stale = [], 0, []
    for block in blocks:
        try:
            body = report.render(block, chinese=path.name.endswith(".zh.md"))
        except ReportError as error:
            raise ReportError(f"{place}:{block.line}: {error}") from None
        if body != text[block.start : block.end]:
            stale.append(block)
        parts += [text[at : block.start], body]
        at = block.end
    return "".join([*parts, text[at:]]), stale


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; returns 0, 1 for stale blocks under --check, or 2 for blocks that cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m common.report", description="Generated parts of the documents.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="make every block anew from the committed results")
    mode.add_argument("--check", action="store_true", help="exit with 1 if a block is not what --write would make")
    options = parser.parse_args(arguments)
    report, errors, stale_count = Report(root), 0, 0
    for path in documents(root):
        try:
            text, stale = update(path, report)
        except ReportError as error:
            print(error, file=sys.stderr)
            errors += 1
            continue
        for block in stale:
            print(f"{path.relative_to(root).as_posix()}:{block.line}: {block.name}", end="")
            print(" is stale" if options.check else " written")
        if stale and options.write:
            path.write_bytes(text.encode("utf-8"))
        stale_count += len(stale)
    if errors:
        return 2
    if stale_count and options.check:
        print(f"{stale_count} stale: run python -m common.report --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
