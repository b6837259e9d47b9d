"""What holds for one engine holds for several ranks: the suites of the earlier chapters run again, with two ranks for each
tiny model and three for SmolLM2. And what only real processes can show: perturbed ranks, memory while loading."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from common import child
from common.checkpoints import resolve
from common.cpu import shm
from common.tiny import cached_tiny_model
from tests.conftest import ONLY, ROOT
from tests.oracle import assert_greedy
from tests.ranks import TP_CHAPTERS
from tests.with_tp import WANTED

NEWEST = TP_CHAPTERS[-1]
SUITES = [
    "test_parity", "test_batching_parity", "test_preemption", "test_engine_rules", "test_engine_steps",
    "test_engine_loop", "test_radix_engine", "test_refusals", "test_refused_models", "test_server_api",
    "test_server_clients", "test_server_door", "test_server_errors", "test_server_load", "test_server_text",
    "test_stop_strings",
]  # fmt: skip
SUBSET = {  # file -> -k; all but the first only with --full
    "test_batching_parity": "(together_at_every_budget and 32) or (too_small and 4)",
    "test_engine_rules": "exactly_max_tokens or stop_strings_across or max_model_len_exactly or batch_mates",
    "test_server_api": "served or stream or completion",
}


def run_suite(name: str, chapter: str, select: str = "", *flags: str, timeout_s: float = 3600.0) -> None:
    """One file of tests in a pytest of its own, over two ranks."""
    expression = f"{chapter} and ({select})" if select else chapter
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.with_tp",
        "-x",
        f"tests/{name}.py",
        "-k",
        expression,
        *flags,
    ]
    env = {**os.environ, WANTED: "2", ONLY: chapter, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if i else []) for i, name in enumerate(SUBSET)]
)
def test_some_of_each_suite_passes_over_two_ranks(name: str) -> None:
    run_suite(name, NEWEST, SUBSET[name], "-o", "addopts=", "-p", "no:randomly", timeout_s=600)


@pytest.mark.full
@pytest.mark.parametrize("chapter", TP_CHAPTERS)
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_passes_over_two_ranks_and_smollm2_over_three(name: str, chapter: str) -> None:
    if not (ROOT / "tests" / f"{name}.py").exists():
        pytest.skip("no such suite")
    run_suite(name, chapter, "", "-o", "addopts=", "-p", "no:randomly")


def test_smollm2_over_three_ranks_says_what_transformers_says() -> None:
    chapter = importlib.import_module(NEWEST)
    prompts = [[504, 3575, 282, 4649, 314], [5, 81, 640] * 20, [28120]]
    params = chapter.SamplingParams(max_tokens=8, ignore_eos=True)
    with chapter.LLM("smollm2-135m", dtype="float32", threads=1, max_model_len=256, tp=3) as llm:
        outputs = llm.generate(prompts, params, progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert assert_greedy(resolve("smollm2-135m").folder, prompt, output.token_ids) > 4


# ---- perturbed ranks ------------------------------------------------------------------------------------------------

# Imported by every Python process that is started with this folder in its path: its clocks are wrong and run too fast.
SKEW = """
import os, time
shift, pace = float(os.environ.get("TEST_CLOCK_SHIFT", "0")), float(os.environ.get("TEST_CLOCK_PACE", "1"))
def skewed(clock):
    return lambda: clock() * pace + shift
time.time, time.monotonic, time.perf_counter = map(skewed, (time.time, time.monotonic, time.perf_counter))
"""


@pytest.fixture
def perturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ranks that are started meanwhile have a wrong clock and a hash seed of their own, and are held up at random, so
    that they come to each collective in another order. Yields their process ids."""
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    pids: list[int] = []
    start = child.start

    def perturbed_start(*args: Any) -> Any:
        seed = len(pids) + 1
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTHONHASHSEED", str(1000 + seed))
        monkeypatch.setenv("TEST_CLOCK_SHIFT", str(86400.0 * seed * (-1) ** seed))
        monkeypatch.setenv("TEST_CLOCK_PACE", str(1 + 0.7 * seed))
        process = start(*args)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(child, "start", perturbed_start)
    over = threading.Event()

    def hold_up() -> None:
        rng = random.Random(7)
        while not over.wait(rng.uniform(0, 0.03)):
            for pid in pids[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(rng.uniform(0, 0.02))
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold_up)
    thread.start()
    yield pids
    over.set()
    thread.join()


def outputs_of(chapter: ModuleType, order: list[int], **options: Any) -> tuple[dict[int, list[int]], dict[str, int]]:
    """Requests with common beginnings in a pool that is too small, added in this order, two of them aborted, one that
    goes to the last position of its context. Returns the tokens of those that ended by themselves, and counters."""
    pool = {"kv_memory": "60K", "page_size": 4, "max_model_len": 64, "max_batch_tokens": 16}
    exact = {"dtype": "float32", "threads": 1, "debug_invariants": True}
    ids = [17, 230, 9, 511, 64, 700, 33, 5, 81, 640, 1002, 1]
    ended: dict[int, list[int]] = {}
    with chapter.LLM(str(cached_tiny_model("llama")), **exact, **pool, **options) as llm:
        rids = {}
        for i in order:
            prompt, tokens = ([i] * 30, 34) if i == 9 else ([*ids[: 6 + i % 5], i], 20)
            rids[i] = llm.add(prompt, chapter.SamplingParams(max_tokens=tokens, ignore_eos=True))
        for step in range(600):
            if step in (4, 9):
                llm.abort(rids[2 if step == 4 else 7])
            for output in llm.step():
                if output.finish_reason == "length":
                    ended[output.prompt_token_ids[-1]] = output.token_ids
            if not llm.has_work():
                return ended, llm.stats()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "gloo"])
def test_clocks_hashes_and_arrival_matter_to_no_rank(
    perturbed: list[int], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = importlib.import_module(NEWEST)
    if not shared:
        monkeypatch.setattr(shm, "works", lambda ranks: False)
    order = list(range(10))
    want, _ = outputs_of(chapter, order)
    random.Random(1).shuffle(order)
    got, stats = outputs_of(chapter, order, tp=2)
    assert stats["preemptions"] > 0 and stats["allreduce_bytes"] > 0
    assert len(got) >= 8 and len(got[9]) == 34, "to the last position"
    assert all(tokens == want[i] for i, tokens in got.items() if i in want)
    assert len(set(perturbed)) == 1, "rank 1 was perturbed"


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_rank_never_holds_more_than_its_share_of_the_weights() -> None:
    """120 MB on disk: what a rank has of its own, after loading and at most while loading, by the number of ranks."""
    from ch09_tp.bench import SMALLER, loading

    model = str(cached_tiny_model("llama", **SMALLER))
    empty, _ = loading(str(cached_tiny_model("llama")), 1, "float32")
    (one, one_peak), (two, two_peak) = (loading(model, tp, "float32") for tp in (1, 2))
    assert one - empty > 90e6
    assert 0.4 < (two - empty) / (one - empty) < 0.6
    assert (two_peak - empty) / (one_peak - empty) < 0.65
