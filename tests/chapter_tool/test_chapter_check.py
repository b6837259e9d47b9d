"""Every rule refuses what it should, at the right place, and says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.chapter_check import check
from common.chapter_tree import load_all
from common.chapters import ROOT

if TYPE_CHECKING:
    from conftest import Tree


def test_sound_chapters_pass(tree: Tree) -> None:
    assert tree.tool("check")[:2] == (0, "")


@pytest.mark.fault(30)
def test_repository_passes() -> None:
    if not load_all(ROOT):
        pytest.skip("no chapter yet")
    assert [str(problem) for problem in check(ROOT)] == []


# What happened must be declared, and what is declared must have happened.


def test_undeclared_change(tree: Tree) -> None:
    tree.append("ch04_cache/core.py", "A = 1\n")
    tree.refuses("ch04_cache/core.py", "differs from ch03_model's", "list it under modified")


def test_undeclared_file(tree: Tree) -> None:
    tree.write("ch04_cache/extra.py", "A = 1\n")
    tree.refuses("ch04_cache/extra.py", "not in ch03_model", "list it under added")


def test_undeclared_removal(tree: Tree) -> None:
    tree.append("ch04_cache/kvcache.py", "# slot\n" * 150)
    (tree.root / "ch04_cache/core.py").unlink()
    tree.refuses("ch04_cache/core.py", "is gone", "list it under removed")


def test_declared_but_equal(tree: Tree) -> None:
    tree.declare("modified", "core.py")
    tree.refuses("ch04_cache/chapter.toml", "core.py is listed as modified but equals", "delete it from the list")


def test_declared_but_absent(tree: Tree) -> None:
    tree.declare("added", "radix.py")
    tree.refuses("ch04_cache/chapter.toml", "radix.py is listed as added but does not exist", "delete it")


def test_declared_removed_but_present(tree: Tree) -> None:
    tree.append("ch04_cache/chapter.toml", "removed = ['core.py']\n")
    tree.refuses("ch04_cache/chapter.toml", "core.py is listed as removed but equals", "delete it")


def test_declared_in_the_wrong_list(tree: Tree) -> None:
    tree.edit("ch04_cache/chapter.toml", "added = ['kvcache.py']", "added = []")
    tree.declare("modified", "kvcache.py")
    tree.refuses("ch04_cache/chapter.toml", "listed as modified but is added", "list it under added")


def test_listed_twice(tree: Tree) -> None:
    tree.declare("modified", "scheduler.py")
    tree.refuses("ch04_cache/chapter.toml", "scheduler.py is listed twice", "list it once")


def test_order_names_no_file(tree: Tree) -> None:
    tree.append("ch04_cache/chapter.toml", "order = ['radix.py']\n")
    tree.refuses("ch04_cache/chapter.toml", "radix.py is listed in order but does not exist", "delete it")


def test_symlink(tree: Tree) -> None:
    (tree.root / "ch04_cache/model.py").unlink()
    (tree.root / "ch04_cache/model.py").symlink_to("../ch03_model/model.py")
    tree.refuses("ch04_cache/model.py", "symlink", "put a real copy")


def test_caches_are_no_files(tree: Tree) -> None:
    tree.write("ch04_cache/__pycache__/core.pyc", "")
    assert check(tree.root) == []


# chapter.toml and the READMEs.


@pytest.mark.parametrize(
    ("line", "what", "todo"),
    [
        ("titel = 'x'", "unknown key 'titel'", "use parent, title"),
        ("budget = '9'", "budget is '9'", "whole number"),
        ("order = 'core.py'", "order is 'core.py'", "list of strings"),
        ("budget =", "cannot be read", "write it as TOML"),
        ("title_zh = ''", "no title_zh", "add one line for each"),
    ],
)
def test_bad_chapter_toml(tree: Tree, line: str, what: str, todo: str) -> None:
    if line.startswith("title_zh"):
        tree.edit("ch04_cache/chapter.toml", 'title_zh = "题"\n', "")
    tree.append("ch04_cache/chapter.toml", line + "\n")
    tree.refuses("ch04_cache/chapter.toml", what, todo)


@pytest.mark.parametrize("parent", ["", "ch01_none", "ch04_cache"])
def test_parent_is_an_earlier_chapter(tree: Tree, parent: str) -> None:
    tree.edit("ch04_cache/chapter.toml", 'parent = "ch03_model"', f'parent = "{parent}"')
    tree.refuses("ch04_cache/chapter.toml", "parent", "name the folder it was copied from")


def test_numbers_are_unique(tree: Tree) -> None:
    (tree.root / "ch04_cache").rename(tree.root / "ch03_other")
    tree.edit("ch03_other/chapter.toml", "ch03_model", "ch02_flow")
    tree.refuses("ch03_other", "has the number of ch03_model", "one of its own")


def test_folder_without_chapter_toml(tree: Tree) -> None:
    tree.write("ch05_bare/core.py", tree.CORE)
    tree.refuses("ch05_bare", "has no chapter.toml", "write one")


def test_readme_missing(tree: Tree) -> None:
    (tree.root / "ch04_cache/README.zh.md").unlink()
    tree.refuses("ch04_cache/README.zh.md", "is missing", "write it")


@pytest.mark.parametrize(("file", "heading"), [("README.md", "Limits"), ("README.zh.md", "代价")])
def test_readme_lacks_a_heading(tree: Tree, file: str, heading: str) -> None:
    tree.edit(f"ch04_cache/{file}", f"## {heading}\n", "")
    tree.refuses(f"ch04_cache/{file}", f"lacks '## {heading}'", "add")


# Imports: a chapter stands alone on common.


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("from ch03_model.model import forward", "another chapter"),
        ("import ch02_flow.core", "another chapter"),
        ('importlib.import_module(f"ch03_model.{name}")', "another chapter"),
        ("from ..ch03_model import model", "beyond its chapter"),
        ("from .. import core", "beyond its chapter"),
        ("from ch04_cache import core", "absolutely"),
        ("import tests.tool", "absolutely"),
        ("from scheduler import finish", "absolutely"),
    ],
)
def test_import_refused(tree: Tree, code: str, what: str) -> None:
    tree.write("tests/tool.py", "")
    tree.append("ch04_cache/bench.py", code + "\n")
    tree.refuses("ch04_cache/bench.py:3", what, "")


def test_imports_allowed(tree: Tree) -> None:
    code = "import torch\nimport common.tool\nfrom . import core\nfrom .core import Req\n"
    tree.append("ch04_cache/kvcache.py", code)
    assert check(tree.root) == []


@pytest.mark.parametrize("code", ["import ch02_flow", "importlib.import_module('ch02_flow.core')"])
def test_common_imports_no_chapter(tree: Tree, code: str) -> None:
    tree.append("common/tool.py", code + "\n")
    tree.refuses("common/tool.py:3", "imports the chapter ch02_flow", "inside a function")


# Words that a copy would make lie.


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("# a new way", "new"),
        ("# Now with slots", "Now"),
        ('def f() -> None:\n    """Freed\n    later."""', "later"),
        ("# no longer padded", "no longer"),
        ("A = 'previously full'", "previously"),
        ("# see the next chapter", "next chapter"),
        ("# 见第六章", "第六章"),
        ("A = f'{1} from Chapter 6'", "Chapter 6"),
        ("A = 'ch04_cache'", "ch04"),
        ("# `ch03_model` does it", "ch03"),
        ("def from_ch03() -> None: ...", "ch03"),
    ],
)
def test_word_refused(tree: Tree, code: str, words: str) -> None:
    tree.append("ch04_cache/kvcache.py", code + "\n")
    line = (tree.CACHE + code[: code.index(words)]).count("\n") + 1
    tree.refuses(f"ch04_cache/kvcache.py:{line}", repr(words), "without the order of chapters")


@pytest.mark.parametrize(
    "code",
    [
        "new_ids = renewed = datetime.now(UTC)",
        "# datetime.now() gives `new` and new_ids, renewed, known, __new__",
        "A = 'the new one, later, now'",
        "batch10 = epoch3 = arch64 = match_02",
    ],
)
def test_word_allowed(tree: Tree, code: str) -> None:
    tree.append("ch04_cache/kvcache.py", code + "\n")
    assert check(tree.root) == []


# Size and shape.


def test_budget(tree: Tree) -> None:
    tree.append("ch04_cache/kvcache.py", "A = 1\n" * 154)
    assert check(tree.root) == []
    tree.append("ch04_cache/kvcache.py", "A = 1\n")
    tree.refuses("ch04_cache", "adds 201 lines of Python, its budget is 200", "make it smaller")
    tree.append("ch04_cache/chapter.toml", "budget = 201\n")
    assert check(tree.root) == []


def test_budget_of_an_unplanned_chapter(tree: Tree) -> None:
    (tree.root / "ch04_cache").rename(tree.root / "ch11_cache")
    tree.refuses("ch11_cache/chapter.toml", "no budget is known", "add budget = LINES")


def test_syntax(tree: Tree) -> None:
    tree.append("ch04_cache/kvcache.py", "def\n")
    tree.refuses("ch04_cache/kvcache.py", "is not valid Python", "mend the syntax")


def test_removed_share(tree: Tree) -> None:
    tree.edit("ch04_cache/kvcache.py", "\n# slots\n" * 20, "")
    tree.edit("ch04_cache/scheduler.py", '    """Take the result."""\n', "")
    tree.refuses("ch04_cache", "removes 1 lines and adds 6, at most 15 %", "earlier chapters")


def test_file_length(tree: Tree) -> None:
    tree.append("ch04_cache/chapter.toml", "budget = 900\n")
    tree.append("ch04_cache/kvcache.py", "A = 1\n" * 306)
    tree.refuses("ch04_cache/kvcache.py", "has 351 lines, at most 350", "split it")


def test_function_length(tree: Tree) -> None:
    tree.append("ch04_cache/kvcache.py", "def f() -> None:\n" + "    A = 1\n" * 60)
    tree.refuses("ch04_cache/kvcache.py:46", "f has 61 lines, at most 60", "split it")


def test_too_many_modified_files(tree: Tree) -> None:
    names = [f"m{number}.py" for number in range(6)]
    for name in names:
        for chapter in ("ch02_flow", "ch03_model", "ch04_cache"):
            tree.write(f"{chapter}/{name}", "A = 1\n")
        tree.append(f"ch04_cache/{name}", "B = 1\n")
    tree.declare("modified", *names)
    tree.refuses("ch04_cache", "modifies 7 files, at most 6", "mend the seam in the earlier chapters first")


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        ("core.py", "LIMIT = 8\n", "LIMITS = LIMIT_ = 8\n", "LIMIT"),
        ("core.py", "def length", "def size", "Req.length"),
        ("core.py", "class Req:", "class Request:", "Req"),
        ("__init__.py", "import Req\n", "import LIMIT\n", "Req"),
    ],
)
def test_public_names_only_grow(tree: Tree, file: str, old: str, new: str, name: str) -> None:
    tree.declare("modified", file)
    tree.edit(f"ch04_cache/{file}", old, new)
    problem = check(tree.root)[0]
    assert (problem.path, problem.what) == (f"ch04_cache/{file}", f"public name {name} of ch03_model is gone")
    assert "names only grow" in problem.todo


def test_private_names_may_go(tree: Tree) -> None:
    tree.declare("modified", "core.py")
    tree.edit("ch04_cache/core.py", "_private", "_other")
    tree.edit("ch04_cache/core.py", "_own", "_mine")
    assert check(tree.root) == []


@pytest.mark.fault(30)
def test_files_never_move(tree: Tree) -> None:
    (tree.root / "ch04_cache/core.py").rename(tree.root / "ch04_cache/objects.py")
    tree.declare("added", "objects.py")
    tree.append("ch04_cache/chapter.toml", "removed = ['core.py']\n")
    tree.append("ch04_cache/objects.py", "A = 1\n" * 100)
    tree.refuses("ch04_cache/objects.py", "looks like ch03_model/core.py moved", "files never move")
