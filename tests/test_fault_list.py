"""The list of faults in docs/ names the tests that would catch each: those that carry its mark, fault(number, ...)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import ROOT

NUMBERS = range(1, 31)


def marked() -> dict[int, set[str]]:
    """Fault -> the tests that carry its mark, as file::name below tests/."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if ast.unparse(mark).startswith("pytest.mark.fault("):
                    for number in ast.literal_eval(f"({ast.unparse(mark).partition('(')[2][:-1]},)"):
                        found[number].add(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def listed(document: Path) -> dict[int, set[str]]:
    """Fault -> the tests that a row of the list names."""
    rows = [line.split("|") for line in document.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    assert [int(row[1]) for row in rows] == list(NUMBERS)
    assert all(re.fullmatch(r" (ch\d\d|common) ", row[3]) for row in rows)
    return {int(row[1]): set(re.findall(r"`([^`]*::[^`]*)`", row[4])) for row in rows}


@pytest.mark.parametrize("document", ["faults.md", "faults.zh.md"])
def test_the_list_names_for_each_fault_the_tests_that_carry_its_mark(document: str) -> None:
    marks, rows = marked(), listed(ROOT / "docs" / document)
    assert sorted(marks) == list(NUMBERS), "each fault has a test"
    for number in NUMBERS:
        assert rows[number] == marks[number], f"fault {number}"
