"""Compile a chapter's Triton kernels for GPUs that need not be here and read what they take: registers, spills, memory.

    python -m common.kernels_aot [--chapter ch07_paged] [--quick] [--json docs/results/kernels_aot.json]

Nothing is described twice: the wrappers are called with tensors without storage (device "meta") of the real shapes, and
every launch they make is compiled, not run, exactly as Triton would specialise it for those arguments. ptxas and cuobjdump
come with Triton.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from common import cli
from common.harness import ROOT

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of shared memory one block may have, by chip
ARCHS = tuple(SHARED_LIMIT)
WORST = ("registers", "spill_bytes", "shared_bytes")  # of Compiled, as the table shows them


@dataclass(frozen=True)
class Shape:
    """What of a model the kernels see; ``page`` is the page size that they are compiled for."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    qk_norm: bool = False
    page: int = 16


SHAPES = (
    Shape("Llama-3.1-8B", 32, 8, 128, 4096, 14336),
    Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072, qk_norm=True),
    Shape("Qwen3-14B", 40, 8, 128, 5120, 17408, qk_norm=True),
    Shape("SmolLM2-135M", 9, 3, 64, 576, 1536),
    Shape("head-dim-80", 32, 32, 80, 2560, 6912, page=1),
)


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. ``spill_bytes`` is per thread: its stack frame and local memory, 0 if all is in registers."""

    case: str
    kernel: str
    shape: str
    dtype: str
    arch: int
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def shared_limit(self) -> int:
        return SHARED_LIMIT[self.arch]


class _Target:
    """A driver as far as compilation needs one: the chip that Triton takes for the current device."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.arch, self.target = arch, GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps compiled kernels by device: these never meet those of a real one

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[list[Any]]:
    """Inside, every launch of a Triton kernel is compiled for sm_``arch`` and collected instead of run."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def collect(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **options))

    before = driver._active  # reading driver.active would look for a GPU
    driver.set_active(_Target(arch))
    try:
        with mock.patch.object(JITFunction, "run", collect), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
            yield compiled
    finally:
        driver._active = before


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes per thread outside of registers) of a binary with one kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    if not found:
        raise RuntimeError(f"cuobjdump said nothing about resources: {done.stdout!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def calls(kernels: ModuleType, shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The wrappers of ``kernels`` as a model of this shape calls them, by a name for the case."""

    def empty(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=of, device="meta")

    def indices(*size: int) -> torch.Tensor:
        return empty(*size, of=torch.int32)

    s, batch, tokens, pages = shape, 4, 512, 4096 // shape.page
    qkv = empty(tokens, s.heads + 2 * s.kv_heads, s.dim)
    qk, v = qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
    q, k, few = qk[:, : s.heads], qk[:, s.heads :], qk[:batch, : s.heads]
    cache, table, lens, scale = empty(pages, s.page, s.kv_heads, s.dim), indices(batch, pages), indices(batch), 0.1
    bounds, cos = indices(batch + 1), empty(tokens, 1, s.dim)
    decode, prefill = kernels.paged_decode, kernels.paged_prefill
    cases: dict[str, Callable[[], Any]] = {
        "store_kv": lambda: kernels.store_kv(k, v, cache, cache, empty(tokens, of=torch.int64)),
        "decode": lambda: decode(few, cache, cache, table, lens, scale, splits=1),
        "decode, 16 splits": lambda: decode(few, cache, cache, table, lens, scale, splits=16),
        "verify 5": lambda: prefill(q, cache, cache, table, bounds, lens, scale, 5),
        "verify 5, 4 splits": lambda: prefill(q, cache, cache, table, bounds, lens, scale, 5, splits=4),
        "prefill 512": lambda: prefill(q, cache, cache, table, bounds, lens, scale, 512),
        "rms_norm": lambda: kernels.add_rms_norm(empty(tokens, s.hidden), empty(s.hidden), 1e-6),
        "add_rms_norm": lambda: kernels.add_rms_norm(
            empty(tokens, s.hidden), empty(s.hidden), 1e-6, empty(tokens, s.hidden)
        ),
        "rotary": lambda: kernels.rotary(qk, cos, cos),
        "silu_and_mul": lambda: kernels.silu_and_mul(empty(tokens, 2 * s.intermediate)),
    }
    if s.qk_norm:
        cases["qk norm"] = lambda: kernels.add_rms_norm(qk, empty(s.heads + s.kv_heads, s.dim), 1e-6)
    return cases


def compile_shape(
    kernels: ModuleType, shape: Shape, dtype: torch.dtype, arch: int, only: tuple[str, ...] = ()
) -> list[Compiled]:
    """Compile the cases (``only`` those named) of one shape; a case of two launches gives two results."""
    results = []
    for name, call in calls(kernels, shape, dtype).items():
        if only and name not in only:
            continue
        with compile_only(arch) as compiled:
            call()
        for binary in compiled:
            about = binary.metadata
            registers, spill = resources(binary.asm["cubin"])
            kind = str(dtype).removeprefix("torch.")
            known = (about.num_warps, about.num_stages, registers, spill, about.shared)
            results.append(Compiled(name, about.name.strip("_"), shape.name, kind, arch, *known))
    return results


def compile_all(kernels: ModuleType, quick: bool, progress: bool = False) -> list[Compiled]:
    """Every case in bfloat16 and float16, for every chip; float32 for one model of each head dimension.

    ``quick`` keeps one dtype and the attention cases.
    """
    from tqdm import tqdm

    runs = [(s, d, a) for s in SHAPES for d in (torch.bfloat16, torch.float16, torch.float32) for a in ARCHS]
    runs = [run for run in runs if run[1] != torch.float32 or run[0] in (SHAPES[0], *SHAPES[3:])]
    if quick:
        runs = [run for run in runs if run[1] == torch.bfloat16 and run[0].name in ("Llama-3.1-8B", "SmolLM2-135M")]
    results = []
    for shape, dtype, arch in tqdm(runs, desc="compiling", disable=not progress):
        only = ("decode, 16 splits", "prefill 512", "add_rms_norm") if quick else ()
        results += compile_shape(kernels, shape, dtype, arch, only)
    return results


def faults(results: list[Compiled]) -> list[str]:
    """One line per kernel that spills registers or wants more shared memory than its chip has."""
    lines = []
    for r in results:
        what = f"{r.case} ({r.kernel}) of {r.shape} in {r.dtype} for sm_{r.arch}"
        if r.spill_bytes:
            lines.append(f"{what} spills {r.spill_bytes} bytes per thread")
        if r.shared_bytes > r.shared_limit:
            lines.append(f"{what} wants {r.shared_bytes} bytes of shared memory, the chip has {r.shared_limit}")
    return lines


def table(results: list[Compiled]) -> dict[str, Any]:
    """The worst of all shapes and dtypes, one row per case and kernel, as the documents show it."""
    archs = [arch for arch in ARCHS if any(r.arch == arch for r in results)]
    rows = []
    for case, kernel in dict.fromkeys((r.case, r.kernel) for r in results):
        row = [case, kernel]
        for arch in archs:
            same = [r for r in results if (r.case, r.kernel, r.arch) == (case, kernel, arch)]
            registers, spilled, shared = (max(getattr(r, key) for r in same) for key in WORST)
            row.append(f"{registers} / {spilled} / {math.ceil(shared / 1024)}")
        rows.append(row)
    return {
        "columns": ["case", "kernel", *[f"sm_{arch}: registers / spilled bytes / shared KiB" for arch in archs]],
        "columns_zh": ["用例", "内核", *[f"sm_{arch}：寄存器 / 溢出字节 / 共享内存 KiB" for arch in archs]],
        "rows": rows,
    }


def latest_chapter() -> str:
    """The last chapter that has kernels."""
    return sorted(path.parent.name for path in ROOT.glob("ch[0-9][0-9]_*/kernels.py"))[-1]


def main() -> int:
    parser = cli.parser("common.kernels_aot", "Compile all Triton kernels for sm_80, sm_90 and sm_100; no GPU needed.")
    parser.add_argument("--chapter", default=latest_chapter(), help="whose kernels (default: the latest)")
    parser.add_argument("--quick", action="store_true", help="the attention of two models in bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write all results with versions and commit")
    args = parser.parse_args()
    from common.experiments import table as show
    from common.harness import save_result

    results = compile_all(importlib.import_module(f"{args.chapter}.kernels"), args.quick, progress=True)
    summary = table(results)
    show(summary["columns"], summary["columns_zh"], summary["rows"])
    bad = faults(results)
    for line in bad:
        print(line)
    if args.json:
        save_result(args.json, {"kernels": [asdict(r) for r in results], "tables": {"kernels": summary}})
        print(f"result: {args.json}")
    print(f"{len(results)} kernels compiled, {len(bad)} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    cli.run_main(main)
