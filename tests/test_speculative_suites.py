"""Guesses change how many forwards the tokens take and nothing else: suites of the plain engine run again with guesses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ONLY, ROOT
from tests.speculation import SPECULATIVE
from tests.with_speculation import WANTED

NEWEST = SPECULATIVE[-1]
SUITES = [
    "test_parity", "test_batching_parity", "test_preemption", "test_engine_rules", "test_engine_steps",
    "test_radix_engine", "test_server_api", "test_server_text", "test_stop_strings",
]  # fmt: skip
SUBSET = "exactly_max_tokens or stop_strings_across or max_model_len_exactly or batch_mates"


def run_suite(name: str, way: str, select: str = "", timeout_s: float = 3600.0) -> None:
    expression = f"{NEWEST} and ({select})" if select else NEWEST
    plain = ["-o", "addopts=", "-p", "no:randomly", "-p", "tests.with_speculation"]
    command = [sys.executable, "-m", "pytest", "-x", f"tests/{name}.py", "-k", expression, *plain]
    env = {**os.environ, WANTED: way, ONLY: NEWEST, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("way", ["ngram", "draft"])
def test_the_plugin_makes_engines_guess(way: str) -> None:
    """Else the runs below would prove nothing."""
    code = (
        "import importlib, tests.with_speculation as w; w.pytest_configure(None)\n"
        "from common.tiny import cached_tiny_model\n"
        "from tests.serving import tiny_flags\n"
        "assert tiny_flags()[-2:] == ['--speculative', 'ngram']\n"
        f"module = importlib.import_module('{NEWEST}')\n"
        "with module.LLM(str(cached_tiny_model('llama')), dtype='float32', threads=1) as llm:\n"
        "    llm.generate([[5, 6] * 8], module.SamplingParams(max_tokens=300, ignore_eos=True), progress=False)\n"
        "    assert llm.stats()['draft_tokens'] > 0\n"
    )
    env = {**os.environ, WANTED: way}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_some_of_a_suite_passes_with_guesses() -> None:
    run_suite("test_engine_rules", "draft", SUBSET, timeout_s=600)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("way", ["ngram", "draft"])
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_passes_with_guesses(name: str, way: str) -> None:
    run_suite(name, way)
