"""A fix in an early chapter reaches the later ones: copied where equal, merged where not, never half-merged."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from common.chapter_check import check

if TYPE_CHECKING:
    from conftest import Tree


def test_forward_copies_where_equal(committed: Tree) -> None:
    committed.edit("ch02_flow/core.py", "LIMIT = 8", "LIMIT = 9")
    status, out, _ = committed.tool("forward", "ch02_flow/core.py")
    assert status == 0
    assert out.splitlines()[:2] == ["copied     ch03_model/core.py", "copied     ch04_cache/core.py"]
    assert "ch03 or ch04" in out.splitlines()[2]
    assert committed.read("ch02_flow/core.py") == committed.read("ch04_cache/core.py")


def test_forward_merges_where_different(committed: Tree) -> None:
    committed.edit("ch02_flow/scheduler.py", "queue[0] if", "queue[-1] if")
    status, out, _ = committed.tool("forward", "scheduler.py", "--from", "ch02")
    assert (status, out.split()[:4]) == (0, ["merged", "ch03_model/scheduler.py", "merged", "ch04_cache/scheduler.py"])
    for chapter in ("ch03_model", "ch04_cache"):
        text = committed.read(f"{chapter}/scheduler.py")
        assert "queue[-1] if" in text and "by age" in text
    assert committed.read("ch04_cache/scheduler.py").endswith("req.length()\n")
    assert check(committed.root) == []


def test_forward_stops_at_a_conflict(committed: Tree) -> None:
    before = committed.read("ch03_model/scheduler.py"), committed.read("ch04_cache/scheduler.py")
    committed.edit("ch02_flow/scheduler.py", "Who runs next.", "Who is to run.")
    status, out, _ = committed.tool("forward", "ch02_flow/scheduler.py")
    assert (status, out.split()[:2]) == (1, ["conflict", "ch03_model/scheduler.py"])
    assert "put the result of ch03_model/scheduler.py.merge into it" in out
    assert "<<<<<<< ch03_model/scheduler.py" in committed.read("ch03_model/scheduler.py.merge")
    assert before == (committed.read("ch03_model/scheduler.py"), committed.read("ch04_cache/scheduler.py"))
    committed.refuses("ch03_model/scheduler.py.merge", "left over from a conflict", "into scheduler.py and delete it")
    # Resolved by hand, the edit goes on from there.
    (committed.root / "ch03_model/scheduler.py.merge").unlink()
    committed.edit("ch03_model/scheduler.py", "Who runs next, by age.", "Who is to run, by age.")
    status, out, _ = committed.tool("forward", "ch03_model/scheduler.py")
    assert (status, out.split()[:2]) == (0, ["merged", "ch04_cache/scheduler.py"])
    assert "Who is to run, by age." in committed.read("ch04_cache/scheduler.py")


def test_forward_again_reaches_chapters_that_still_wait(committed: Tree) -> None:
    for chapter in ("ch02_flow", "ch03_model"):
        committed.edit(f"{chapter}/core.py", "LIMIT = 8", "LIMIT = 9")
    out = committed.tool("forward", "ch02_flow/core.py")[1]
    assert out.split()[:4] == ["unchanged", "ch03_model/core.py", "copied", "ch04_cache/core.py"]


def test_forward_twice_changes_nothing_more(committed: Tree) -> None:
    committed.edit("ch02_flow/scheduler.py", "queue[0] if", "queue[-1] if")
    committed.tool("forward", "ch02_flow/scheduler.py")
    text = committed.read("ch04_cache/scheduler.py")
    out = committed.tool("forward", "ch02_flow/scheduler.py")[1]
    assert out.split()[:4] == ["unchanged", "ch03_model/scheduler.py", "unchanged", "ch04_cache/scheduler.py"]
    assert committed.read("ch04_cache/scheduler.py") == text


def test_forward_ends_where_the_edit_was_committed(committed: Tree) -> None:
    """The chapter's descendants have had it since, or chose otherwise."""
    committed.edit("ch03_model/core.py", "LIMIT = 8", "LIMIT = 9")
    committed.git("commit", "-qam", "later chapter first")
    committed.edit("ch02_flow/core.py", "LIMIT = 8", "LIMIT = 9")
    out = committed.tool("forward", "ch02_flow/core.py")[1]
    assert out.splitlines()[0].split() == ["unchanged", "ch03_model/core.py"]
    assert "ch04_cache/core.py" not in out and "LIMIT = 8" in committed.read("ch04_cache/core.py")


def test_forward_several_files_and_added_ones(committed: Tree) -> None:
    committed.write("ch02_flow/extra.py", "A = 1\n")
    committed.edit("ch03_model/model.py", "return ids", "return ids[:]")
    assert committed.tool("forward", "ch03_model/model.py", "ch02_flow/extra.py")[0] == 0
    assert committed.read("ch04_cache/extra.py") == committed.read("ch03_model/extra.py") == "A = 1\n"
    assert "ids[:]" in committed.read("ch04_cache/model.py")


def test_forward_ends_where_the_file_was_removed(committed: Tree) -> None:
    (committed.root / "ch03_model/core.py").unlink()
    committed.edit("ch02_flow/core.py", "LIMIT = 8", "LIMIT = 9")
    status, out, _ = committed.tool("forward", "ch02_flow/core.py")
    assert (status, out.split()[:2]) == (0, ["removed", "ch03_model/core.py"])
    assert "LIMIT = 8" in committed.read("ch04_cache/core.py")


def test_forward_dry_run_writes_nothing(committed: Tree) -> None:
    committed.edit("ch02_flow/core.py", "LIMIT = 8", "LIMIT = 9")
    assert "copied     ch04_cache/core.py" in committed.tool("forward", "--dry-run", "ch02_flow/core.py")[1]
    assert "LIMIT = 8" in committed.read("ch03_model/core.py")


def test_forward_from_a_given_base_needs_no_git(tree: Tree) -> None:
    shutil.copy(tree.root / "ch02_flow/core.py", tree.root / "old.txt")
    tree.edit("ch02_flow/core.py", "LIMIT = 8", "LIMIT = 9")
    assert tree.tool("forward", "ch02_flow/core.py", "--base", str(tree.root / "old.txt"))[0] == 0
    assert "LIMIT = 9" in tree.read("ch04_cache/core.py")
