"""Every kernel compiles for sm_80, sm_90 and sm_100 without spilled registers and within the chip's shared memory."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from tests.conftest import CHAPTERS, ROOT

pytest.importorskip("triton", reason="Triton is only there on Linux")

from common import kernels_aot

KERNELS = list(
    {(ROOT / n / "kernels.py").read_text(): n for n in CHAPTERS[::-1] if (ROOT / n / "kernels.py").exists()}.values()
)


def show(results) -> None:
    """The table that the report of a failed or verbose run shows."""
    found = kernels_aot.table(results)
    for row in (found["columns"], *found["rows"]):
        print(" | ".join(row))


@pytest.mark.parametrize("name", KERNELS)
def test_attention_of_two_models_in_bfloat16(name):
    results = kernels_aot.compile_all(importlib.import_module(f"{name}.kernels"), quick=True)
    show(results)
    assert {r.arch for r in results} == {80, 90, 100}
    assert {r.shape for r in results} == {"Llama-3.1-8B", "SmolLM2-135M"}
    assert {r.kernel for r in results} == {"attend", "reduce", "add_rms_norm"}
    assert kernels_aot.faults(results) == []


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles(name):
    """One shape, one chip: the cases cover every kernel that the chapter has."""
    kernels = importlib.import_module(f"{name}.kernels")
    shape = next(s for s in kernels_aot.SHAPES if s.name == "Qwen3-0.6B")
    results = kernels_aot.compile_shape(kernels, shape, torch.bfloat16, 90)
    show(results)
    assert {r.kernel for r in results} == {
        key[1:] for key, value in vars(kernels).items() if hasattr(value, "cache_key")
    }
    assert kernels_aot.faults(results) == []


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_everything(name):
    """All cases, five shapes, bfloat16 and float16 (float32 for some), three chips."""
    results = kernels_aot.compile_all(importlib.import_module(f"{name}.kernels"), quick=False)
    show(results)
    assert len(results) > 400
    assert kernels_aot.faults(results) == []


def test_spills_and_large_tiles_are_found(monkeypatch):
    """A tile that no chip has the registers for, and one that no chip has the shared memory for."""
    kernels = importlib.import_module(f"{KERNELS[-1]}.kernels")
    shape = kernels_aot.SHAPES[0]
    monkeypatch.setattr(kernels, "attention_blocks", lambda *_: (128, 128, 4, 2))
    results = kernels_aot.compile_shape(kernels, shape, torch.bfloat16, 80, ("prefill 512",))
    assert "spills" in kernels_aot.faults(results)[0]
    wide = replace(results[0], spill_bytes=0, shared_bytes=164 * 1024)
    assert "shared memory" in kernels_aot.faults([wide])[0]
    assert kernels_aot.faults([replace(wide, arch=90)]) == []


def test_compiling_leaves_triton_as_it_was():
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, active = JITFunction.run, driver._active
    with kernels_aot.compile_only(90):
        assert JITFunction.run is not run
    assert JITFunction.run is run
    assert driver._active is active
