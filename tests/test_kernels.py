"""The Triton kernels: what they compute (in Triton's interpreter, in a process of its own) and how their grids are chosen."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from tests.conftest import CHAPTERS, ROOT

pytest.importorskip("triton", reason="Triton is only there on Linux")
KERNELS = [name for name in CHAPTERS if (ROOT / name / "kernels.py").exists()]


def test_kernels_agree_with_torch_in_the_interpreter(request):
    """tests/kernels_interpreted.py, whose failures this one shows."""
    command = [sys.executable, "-m", "pytest", "tests/kernels_interpreted.py", "-p", "no:cacheprovider"]
    if request.config.getoption("--full"):
        command.append("--full")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout


@pytest.fixture(params=KERNELS)
def kernels(request):
    return importlib.import_module(f"{request.param}.kernels")


def test_parts_fill_the_gpu_and_no_more(kernels):
    """132 processors: few long requests are split, many or short ones are not; always a power of two."""
    assert kernels.choose_splits(8, 131_072, 132) == 32
    assert kernels.choose_splits(8, 2048, 132) == 8, "a part has at least 256 tokens"
    assert kernels.choose_splits(8, 255, 132) == 1
    assert kernels.choose_splits(64, 131_072, 132) == 4
    assert kernels.choose_splits(512, 131_072, 132) == 1
    assert kernels.choose_splits(3, 4096, 1) == 1


def test_blocks_follow_the_rows(kernels):
    """16 rows are the least that tensor cores take; more rows than there are would be computed for nothing."""
    import torch

    assert [kernels.attention_blocks(rows, 128, torch.bfloat16)[0] for rows in (1, 16, 17, 45, 5000)] == [
        16,
        16,
        32,
        64,
        128,
    ]


def test_gpu_check_without_a_gpu_is_one_clear_line():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-m", "common.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "GPU" in done.stderr


@pytest.mark.parametrize("name", KERNELS)
def test_importing_a_chapter_does_not_import_its_kernels(name):
    """So that it runs where there is no Triton."""
    code = f"import sys, {name}.engine, {name}.attention, {name}.ops; sys.exit('{name}.kernels' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
