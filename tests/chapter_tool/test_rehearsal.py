"""A fault in ch04 that all later chapters share is mended there and carried to the last one with one command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapter_tool.conftest import Tree
from tests.conftest import CHAPTERS, ROOT

FIRST, LAST = "ch04_kvcache", CHAPTERS[-1]
FILE = "scheduler.py"  # most later chapters have a version of their own
RIGHT, WRONG = "req.output_len >= req.max_tokens", "req.output_len > req.max_tokens"
TOKENS = """
import sys, importlib
for name in sys.argv[1:]:
    chapter = importlib.import_module(name)
    with chapter.LLM("dummy:llama-tiny", dtype="float32", native="off", threads=1) as llm:
        [output] = llm.generate([[5, 6, 7]], chapter.SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    print(len(output.token_ids))
"""


@pytest.fixture
def copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tree:
    """The chapters and the tool in a repository of their own, everything committed."""
    copy = Tree(tmp_path / "copy", capsys)
    for name in ("common", *CHAPTERS):
        shutil.copytree(ROOT / name, copy.root / name, ignore=shutil.ignore_patterns("__pycache__"))
    copy.git("init", "-q")
    copy.git("add", "-A")
    copy.git("commit", "-qm", "chapters")
    return copy


def run(copy: Tree, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=copy.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.fault(30)
def test_a_fix_in_ch04_reaches_the_last_chapter(copy: Tree) -> None:
    later = [name for name in CHAPTERS if name > FIRST]
    before = {name: copy.read(f"{name}/{FILE}") for name in later}
    assert len(set(before.values())) > 3, "versions that a plain copy would destroy"

    for name in (FIRST, *later):
        copy.edit(f"{name}/{FILE}", RIGHT, WRONG)
    copy.git("commit", "-qam", "one token too many")
    assert run(copy, "-c", TOKENS, FIRST, LAST).split() == ["4", "4"]

    copy.edit(f"{FIRST}/{FILE}", WRONG, RIGHT)
    said = run(copy, "-m", "common.chapters", "forward", f"{FIRST}/{FILE}")
    assert [line.split()[1] for line in said.splitlines()[:-1]] == [f"{name}/{FILE}" for name in later]
    assert {name: copy.read(f"{name}/{FILE}") for name in later} == before, "the mend, and nothing but the mend"
    assert run(copy, "-c", TOKENS, FIRST, LAST).split() == ["3", "3"]
