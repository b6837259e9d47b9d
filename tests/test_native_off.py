"""The compiled CPU operators are an optimisation and nothing else: the suites are green without them too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.test_tp_suites import SUITES


def run_suite(name: str, *flags: str, timeout_s: float) -> None:
    plain = ["-o", "addopts=", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "tests.without_native", f"tests/{name}.py", *plain, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_plugin_takes_the_operators_away() -> None:
    """Else the runs below would prove nothing."""
    code = (
        "import importlib, tests.without_native as w; w.pytest_configure(None)\n"
        "from tests.conftest import ENGINES; from tests.serving import tiny_flags\n"
        "assert tiny_flags()[-2:] == ['--native', 'off']\n"
        "for name in ENGINES:\n"
        "    config = importlib.import_module(name + '.config').EngineConfig(model='dummy:tiny', native='auto')\n"
        "    assert config.native == 'off', name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_passes_without_them(name: str) -> None:
    run_suite(name, timeout_s=3600)
