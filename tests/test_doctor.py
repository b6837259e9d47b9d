"""The doctor says one clear line per finding, runs nothing, and never fails itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common import doctor
from common.host import native_bfloat16
from tests.conftest import CHAPTERS, ROOT


def command(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.doctor"], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )


def test_the_command_names_every_chapter_and_what_the_machine_has():
    done = command()
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line[:1] in "✓·✗" and line}
    for name in ("python", "packages", "torch", "processor", "dtypes", "memory", "GPU", "Triton", "ports", *CHAPTERS):
        assert name in lines, f"no line for {name}"
    assert ("native" in lines["dtypes"]) == native_bfloat16()
    assert "serve" in lines["ch05_serving"] and "serve" not in lines["ch04_kvcache"]


def test_a_machine_without_compiler_and_cache_gets_lines_and_no_traceback():
    done = command(PATH="/nonexistent", MINISGL_CACHE="/proc/nobody", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert "no C++ compiler" in done.stdout and "cannot be written; set MINISGL_CACHE" in done.stdout


def test_whatever_a_look_raises_is_a_finding():
    def broken() -> doctor.Finding:
        raise ZeroDivisionError("two\nlines")

    assert [str(f) for f in doctor.guarded("x", broken)] == [
        "✗ x                  cannot be told: ZeroDivisionError: two lines"
    ]


def test_a_chapter_that_cannot_be_imported_is_a_line(tmp_path: Path, monkeypatch, capsys):
    toml = 'title = "t"\ntitle_zh = "t"\nmechanism = "m"\n'
    for name, source in {"ch91_bad": "import nothing_like_this", "ch92_worse": "1/0"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "chapter.toml").write_text(toml)
        (tmp_path / name / "__init__.py").write_text(source)
    (tmp_path / "ch93_toml").mkdir()
    (tmp_path / "ch93_toml" / "chapter.toml").write_text("no")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor"])
    assert doctor.main(tmp_path) == 1
    out = capsys.readouterr().out
    assert "✗ ch91_bad           cannot be imported: No module named 'nothing_like_this'" in out
    assert "✗ ch92_worse         cannot be imported: division by zero" in out
    assert "✗ ch93_toml" in out and "No chapter can run here" in out


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "has", lambda name: name not in ("tokenizers", "fastapi"))
    first, second = doctor.packages()
    assert first.state == doctor.BAD and "missing for every chapter: tokenizers" in first.text
    assert "missing for servers, from ch05 on: fastapi" in second.text


def test_it_looks_at_a_machine_without_torch():
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['doctor']\n"
        "runpy.run_module('common.doctor', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "✗ torch" in done.stdout and "--dtype auto is" in done.stdout, done.stderr
    assert "cannot be told" not in done.stdout


def test_a_taken_port_is_told_with_what_to_do(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        found = doctor.ports()
    assert found.state == doctor.WARN and "is taken: serve with --port 0" in found.text


@pytest.mark.parametrize(("gib", "state"), [(1, doctor.WARN), (16, doctor.OK)])
def test_little_memory_is_a_note(monkeypatch, gib, state):
    monkeypatch.setattr(doctor, "_available", lambda: gib * 2**30)
    assert doctor.memory().state == state
