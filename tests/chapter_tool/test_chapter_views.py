"""What readers see of the chapters: sizes, diffs, lineage, objects; and how a senseless request is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common.chapter_diff import lineage
from common.chapter_objects import objects
from common.chapter_tree import find, load_all
from common.chapters import ROOT

if TYPE_CHECKING:
    from conftest import Tree


def test_list(tree: Tree) -> None:
    status, out, _ = tree.tool("list")
    lines = sum(text.count("\n") for text in (tree.CORE, tree.SCHEDULER, '"""An engine."""\n\nfrom .core import Req\n'))
    first = ["ch02_flow", "-", "one", "thing", str(lines), str(lines), "0", "700"]
    assert (status, out.splitlines()[1].split()) == (0, first)
    assert out.splitlines()[3].split()[-4:] == [str(lines + 45 + 1 + 45), "46", "0", "200"]
    assert tree.tool("list", "--markdown")[1].startswith(
        "| chapter | parent | mechanism | lines | added | removed | budget |"
    )


def test_diff_follows_the_reading_order(tree: Tree) -> None:
    _, out, _ = tree.tool("diff", "04")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("=====")] == [
        "scheduler.py:", "kvcache.py:", "bench.py:"]  # fmt: skip
    assert "--- a/ch03_model/scheduler.py\n+++ b/ch04_cache/scheduler.py\n" in out
    assert "+    req.length()\n" in out
    tree.append("ch04_cache/chapter.toml", "order = ['kvcache.py']\n")
    assert tree.tool("diff", "ch04")[1].startswith("===== kvcache.py: added +45 -0\n--- /dev/null\n")


def test_diff_makes_the_chapter_of_its_parent(tree: Tree) -> None:
    tree.append("ch04_cache/kvcache.py", "END = 1")
    tree.append("ch03_model/scheduler.py", "# cut in ch04")
    diff = tree.tool("diff", "04")[1]
    subprocess.run(["git", "apply", "-p2"], input=diff, text=True, cwd=tree.root / "ch03_model", check=True)
    for file in ("scheduler.py", "kvcache.py", "bench.py"):
        assert tree.read(f"ch03_model/{file}") == tree.read(f"ch04_cache/{file}")


def test_diff_of_the_first_chapter_is_all_of_it(tree: Tree) -> None:
    out = tree.tool("diff", "2")[1]
    assert all(f"+{line}\n" in out for line in tree.CORE.splitlines())


def test_stat_counts_against_the_budget(tree: Tree) -> None:
    tree.edit("ch04_cache/scheduler.py", '"""Take the result."""', '"""Take one."""')
    rows = [line.split() for line in tree.tool("diff", "ch04_cache", "--stat")[1].splitlines()]
    assert rows[1] == ["scheduler.py", "modified", "+2", "-1"]
    assert rows[2] == ["kvcache.py", "added", "+45", "0"]
    assert rows[3] == ["bench.py", "modified", "+1", "0", "(not", "counted)"]
    assert " ".join(rows[4]) == "total +47 -1 (2.1 % of added), 153 left of a budget of 200"


def test_lineage(tree: Tree) -> None:
    header, rows = lineage(load_all(tree.root))
    assert header == ["file", "ch02", "ch03", "ch04"]
    assert {row[0]: "".join(row[1:]) for row in rows} == {
        "__init__.py": "AAA", "core.py": "AAA", "scheduler.py": "ABC", "model.py": "·AA", "kvcache.py": "··A"}  # fmt: skip
    markdown = tree.tool("lineage", "--markdown")[1].splitlines()
    assert markdown[:2] == ["| file | ch02 | ch03 | ch04 |", "| --- | --- | --- | --- |"]
    assert "| scheduler.py | A | B | C |" in markdown


def test_objects(tree: Tree) -> None:
    tree.declare("modified", "core.py")
    tree.edit("ch04_cache/core.py", "return LIMIT", "return LIMIT + 1  # a comment is no change, this is")
    tree.append("ch04_cache/core.py", "\n\nclass Page(Req):\n    def size(self) -> int:\n        return 1\n")
    tree.write("docs/official.toml", '[files]\n"core.py" = "core.py"\n')
    tree.append(
        "ch04_cache/core.py", "\n    @property\n    def top(self): ...\n    @top.setter\n    def top(self, x): ...\n"
    )
    chapters = load_all(tree.root)
    found = objects(tree.root, chapters, find(chapters, "04"))
    assert [(item.kind, item.name, item.change, item.place.partition("/")[2]) for item in found] == [
        ("method", "Req.length", "changed", "core.py:10"),
        ("class", "Page", "added", "core.py:18"),
        ("method", "Page.size", "added", "core.py:19"),
        ("method", "Page.top", "added", "core.py:23"),
        ("function", "finish", "changed", "scheduler.py:16"),
        ("class", "Cache", "added", "kvcache.py:4"),
    ]
    assert (found[0].purpose, found[0].official) == ("Tokens in all.", "core.py")
    assert (found[4].purpose, found[4].official) == ("The end.", "")


# A request that makes no sense: one line and exit status 2.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["diff", "09"], "unknown chapter '09'; choose from ch02_flow, ch03_model, ch04_cache"),
        (["diff"], "required: chapter"),
        (["paint"], "invalid choice"),
        (["forward", "ch02_flow/core.py"], "equals its HEAD version; edit it first"),
        (["forward", "ch02_flow/none.py"], "no such file"),
        (["forward", "core.py"], "unknown chapter 'core.py'"),
        (["forward", "ch02_flow/core.py", "--base", "none.py"], "none.py: no such file"),
        (["forward", "ch02_flow/core.py", "ch03_model/core.py", "--base", "x"], "forward the files one by one"),
    ],
)
def test_bad_request(committed: Tree, arguments: list[str], says: str) -> None:
    status, out, err = committed.tool(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_forward_without_a_commit_asks_for_the_base(tree: Tree) -> None:
    tree.git("init", "-q")
    status, _, err = tree.tool("forward", "ch02_flow/core.py")
    assert (status, err.count("\n"), "--base FILE" in err) == (2, 1, True)


def test_forward_of_an_uncommitted_file_with_copies_asks_for_the_base(committed: Tree) -> None:
    committed.write("ch02_flow/extra.py", "A = 2\n")
    committed.write("ch03_model/extra.py", "A = 1\n")
    status, _, err = committed.tool("forward", "ch02_flow/extra.py")
    assert (status, err.count("\n"), "--base FILE" in err) == (2, 1, True)


def test_command_line() -> None:
    command = [sys.executable, "-m", "common.chapters", "diff", "99"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
