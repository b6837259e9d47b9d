"""What the chapters' experiments have in common: their command line, the machine's floors, and a sweep over context length."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import cli
from common.checkpoints import resolve
from common.harness import Worker, interleave, save_result, summarise
from common.host import floors, kept_dtype, measure_bandwidth, measure_gemm, native_bfloat16, weight_bytes
from common.workloads import Request, Workload, get


@dataclass
class Experiment:
    """One run of a chapter's bench command: what the user chose, and the result as it grows."""

    args: argparse.Namespace
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        return self.args.quick

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of every engine of the comparison; equal ones, so that only the engines differ."""
        return {"model": self.args.model, "dtype": self.args.dtype, "threads": self.args.threads}

    @property
    def dtype(self) -> str:
        return ("bfloat16" if native_bfloat16() else "float32") if self.args.dtype == "auto" else self.args.dtype

    def figure(self, name: str) -> Path | None:
        """Where to write a figure, None if none are wanted."""
        return Path(self.args.figures) / name if self.args.figures else None

    def machine(self) -> tuple[float, float]:
        """Read bandwidth in bytes/s and product rate in operations/s of this machine, measured here and recorded."""
        bandwidth = measure_bandwidth(self.args.threads)
        flops = measure_gemm(self.dtype, self.args.threads)
        config = resolve(self.args.model).config
        self.data["machine"] = {
            "bandwidth_gb_s": bandwidth / 1e9,
            "gemm_gflop_s": flops / 1e9,
            "weight_mb": weight_bytes(config, kept_dtype(config, self.dtype)) / 1e6,
            "dtype": self.dtype,
        }
        return bandwidth, flops

    def floors(self, workload: Workload, machine: tuple[float, float]) -> dict[str, float]:
        return floors(resolve(self.args.model).config, self.dtype, *machine, workload)

    def finish(self) -> int:
        """Write the result where --json says, and say where."""
        if self.args.json:
            save_result(self.args.json, self.data, threads=self.args.threads)
            print(f"result: {self.args.json}")
        if self.args.figures:
            print(f"figures: {self.args.figures}")
        return 0


def start(module: str, description: str) -> Experiment:
    """Read the flags that every bench command has."""
    parser = cli.parser(module, description)
    parser.add_argument("--quick", action="store_true", help="fewer runs and shorter workloads, under a minute")
    parser.add_argument("--json", metavar="FILE", help="write the result with its host record")
    parser.add_argument("--figures", metavar="FOLDER", help="write the figures")
    parser.add_argument("--model", default="smollm2-135m", help="local folder, Hub id or preset")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of all engines")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of all engines (default: 2)")
    return Experiment(parser.parse_args())


def context_sweep(
    workers: dict[str, Worker], lengths: Sequence[int], new_tokens: int, rounds: int
) -> dict[str, list[tuple[int, float]]]:
    """Median seconds per output token of one request after a prompt of each length: {engine: [(length, tpot_s)]}."""
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in workers}
    ids = get("latency", length_scale=max(lengths) / 128).requests[0].prompt_ids
    for length in lengths:
        prompt = tuple(ids[i % len(ids)] for i in range(length))
        workload = Workload(f"context-{length}", (Request(prompt, new_tokens),), f"{length} in, {new_tokens} out")
        for name, runs in interleave(workers, workload, rounds).items():
            series[name].append((length, summarise(run.metric("tpot_s") for run in runs)["median"]))
    return series


def milliseconds(seconds: float) -> str:
    """A duration as a table cell, three significant digits."""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def table(
    columns: Sequence[str],
    columns_zh: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    words: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A table as result files hold it (common.report), printed on the way, as wide as it needs where nobody's terminal
    sets a limit. `words` puts the first two columns of its Chinese twin into Chinese."""
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    shown = Table(*columns)
    for row in cells:
        shown.add_row(*row)
    (Console() if sys.stdout.isatty() else Console(width=200)).print(shown)
    twin = {"rows_zh": [[*(_translate(cell, words) for cell in row[:2]), *row[2:]] for row in cells]} if words else {}
    return {"columns": list(columns), "columns_zh": list(columns_zh), "rows": cells, **twin, **more}


def _translate(cell: str, words: Mapping[str, str]) -> str:
    for word, chinese in words.items():
        cell = cell.replace(word, chinese)
    return cell
