"""make's variables: from its command line only, passed on as they are."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make")


def planned(*arguments: str, **environment: str) -> str:
    """The last command that make would run."""
    line = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", *arguments]
    outer = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    done = subprocess.run(line, cwd=ROOT, env=outer | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_shells_own_variables_mean_nothing_to_make() -> None:
    mine = {
        "HOST": "0.0.0.0",
        "PORT": "1",
        "PROMPT": "%n@%m",
        "CHAPTER": "x",
        "MODEL": "y",
        "ARGS": "--no",
        "JOBS": "99",
    }
    for goal in ("serve", "generate", "test"):
        assert planned(goal, **mine) == planned(goal)
    assert "--host 127.0.0.1 --port 8000" in planned("serve", **mine)


def test_what_is_given_to_make_arrives() -> None:
    assert "ch06_batching.serve" in planned("serve", "CHAPTER=ch06_batching/", "PORT=8001")
    assert "--port 8001" in planned("serve", "PORT=8001", "ARGS=--max-running 8")
    asked = planned("generate", "PROMPT=It's $5, not $HOME")
    assert "--prompt 'It'\\''s $5, not $HOME'" in asked
    assert "-n 0 " in planned("test", "JOBS=0")
