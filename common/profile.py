"""Where the time of an engine's step goes, next to the floor: `python -m common.profile ch08 --workload offline`.

The clock is attached from outside (common.profile_clock); rounds with and without it alternate, and what it costs is
part of the result. `--grid` measures a decode step against batch and context instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import cli, plots
from common.chapter_tree import find, load_all
from common.checkpoints import resolve
from common.compare_measure import Settings, machine
from common.compare_plan import warmup
from common.engines import ChapterEngine
from common.experiments import milliseconds, table
from common.harness import ROOT, RunResult, ratio, save_result, summarise
from common.host import BYTES, kept_dtype, native_bfloat16, parameter_counts
from common.load import load
from common.profile_clock import ATTENTION, LINEARS, PARTS, Clock, Step, attached
from common.service import Server
from common.worker import drive
from common.workloads import BUILDERS, Workload, encode_texts, get

OUT = Path("profile_out")
SHADES = dict(
    zip(
        (*PARTS, "server"),
        ("#3f78b5", "#d98b2b", "#5b9a4f", "#b5a642", "#7560a8", "#b0558f", "#2f8f8b", "#c0504d", "#8d8d8d", "#2b2f36"),
        strict=True,
    )
)
NAMES_ZH = {
    "linears": "线性层", "attention": "注意力", "rest of the model": "模型其余部分", "input tensors": "输入张量",
    "sampler": "采样", "proposer": "提议者", "scheduler": "调度", "detokenizer": "反分词",
    "engine loop, rest": "引擎循环等", "server": "服务器", "whole step": "整步",
}  # fmt: skip


KINDS_ZH = {"decode": "解码", "with prompts": "含提示词"}


class Floor:
    """What a step needs at least on this machine: bytes over the measured bandwidth or operations over the measured
    product rate, whichever takes longer."""

    def __init__(self, config: dict[str, Any], dtype: str, bandwidth: float, flops: float) -> None:
        counts, heads = parameter_counts(config), config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        layers = config["num_hidden_layers"]
        self.linear, self.head, self.size = counts["linear"], counts["head"], BYTES[kept_dtype(config, dtype)]
        self.bandwidth, self.flops = bandwidth, flops
        self.token_bytes = 2 * layers * (config.get("num_key_value_heads") or heads) * dim * BYTES[dtype]
        self.pair_flops = 4 * layers * heads * dim  # query times key, and weight times value

    def linears(self, rows: int, logit_rows: int) -> float:
        """Seconds for the products of a step; every weight is read once, the head's only where there are logits."""
        read = (self.linear + self.head * (logit_rows > 0)) * self.size / self.bandwidth
        return max(read, 2 * (self.linear * rows + self.head * logit_rows) / self.flops)

    def attention(self, context: int, pairs: int) -> float:
        """Seconds for reading the keys and values of `context` tokens once, or for multiplying `pairs`."""
        return max(context * self.token_bytes / self.bandwidth, pairs * self.pair_flops / self.flops)

    def of(self, step: Step) -> dict[str, float]:
        return {
            LINEARS: self.linears(step.rows, step.logit_rows),
            ATTENTION: self.attention(step.context, step.pairs),
        }


def breakdown(steps: Sequence[Step], floor: Floor) -> dict[str, Any]:
    """Means over the steps, in seconds: {steps, rows, context, total_s, parts: {part: {s, share, floor_s}}, floor_s}."""
    count, total = len(steps), sum(step.total_s for step in steps)
    floors = [floor.of(step) for step in steps]
    parts: dict[str, dict[str, float]] = {}
    for part in PARTS:
        seconds = sum(step.parts.get(part, 0.0) for step in steps)
        if seconds or part in (LINEARS, ATTENTION):
            parts[part] = {"s": seconds / count, "share": seconds / total}
        if part in floors[0]:
            parts[part]["floor_s"] = sum(one[part] for one in floors) / count
    return {
        "steps": count,
        "rows": sum(step.rows for step in steps) / count,
        "context": sum(step.context for step in steps) / count,
        "total_s": total / count,
        "floor_s": sum(sum(one.values()) for one in floors) / count,
        "parts": parts,
    }


def kinds(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The steps in which every request only continues its answer, and those that compute prompts too."""
    found = {"decode": [s for s in steps if s.decode], "with prompts": [s for s in steps if not s.decode]}
    return {kind: some for kind, some in found.items() if some}


def run(
    engine: ChapterEngine, workload: Workload, warm: Workload, rounds: int, url: str = ""
) -> tuple[list[Step], dict[str, list[Any]]]:
    """The steps seen by the clock, and the runs by kind: plain, clocked and, with a server's `url`, over HTTP.

    Rounds go forth and back. The clock is off in plain runs.
    """
    clock = Clock(_device_wait(engine.llm))
    runs: dict[str, list[Any]] = {"plain": [], "clocked": []} | ({"http": []} if url else {})
    drive(engine, warm)
    if url:
        load(url, warm)
    with tqdm(total=len(runs) * rounds, desc=f"{engine.name} {workload.name}", file=sys.stderr, leave=False) as bar:
        for i in range(rounds):
            for kind in list(runs) if i % 2 == 0 else reversed(runs):
                bar.set_postfix_str(kind)
                if kind == "http":
                    runs[kind].append(load(url, _shifted(workload, i)))
                else:
                    _forget(engine.llm)
                    with attached(engine.llm, engine.name, clock) if kind == "clocked" else nullcontext():
                        runs[kind].append(drive(engine, workload))
                bar.update()
    return clock.steps, runs


def _forget(llm: Any) -> None:
    """Empty the prefix cache: no run may find what another one computed."""
    if flush := getattr(getattr(llm.engine, "kv", None), "flush", None):
        flush()


def _shifted(workload: Workload, by: int) -> Workload:
    """The same lengths and arrivals with other tokens, each id moved within the drawn range: a server's prefix cache
    cannot be emptied from here. Where content matters the workload stays as it is."""
    if workload.name == "edit":
        return workload
    ids = [i for r in workload.requests for i in r.prompt_ids]
    lo, count = min(ids), max(ids) + 1 - min(ids)
    requests = (
        replace(r, prompt_ids=tuple(lo + (i - lo + by) % count for i in r.prompt_ids)) for r in workload.requests
    )
    return replace(workload, requests=tuple(requests))


def _device_wait(llm: Any) -> Any:
    if llm.engine.device.type != "cuda":
        return None
    import torch

    return torch.cuda.synchronize


def report(data: dict[str, Any]) -> dict[str, Any]:
    """One table per kind of step: milliseconds, share of the step, floor, and how far above it."""
    tables = {}
    for kind, found in data["steps"].items():
        rows = []
        for part, values in found["parts"].items():
            at = values.get("floor_s")
            above = [milliseconds(at), f"{values['s'] / at:.2f}"] if at else ["", ""]
            rows.append([part, milliseconds(values["s"]), f"{values['share']:.1%}", *above])
        above = [milliseconds(found["floor_s"]), f"{found['total_s'] / found['floor_s']:.2f}"]
        rows.append(["whole step", milliseconds(found["total_s"]), "100%", *above])
        if "server_s" in data:
            rows.append(["server", milliseconds(data["server_s"]), "", "", ""])
        title = f"{found['steps']:,} steps, {found['rows']:.1f} rows"
        tables[kind.replace(" ", "_")] = table(
            [f"{kind}: {title}", "ms", "share", "floor ms", "times the floor"],
            [
                f"{KINDS_ZH[kind]}：{found['steps']:,} 步，平均 {found['rows']:.1f} 行",
                "ms",
                "占比",
                "下限 ms",
                "下限的倍数",
            ],
            rows,
            rows_zh=[[NAMES_ZH[row[0]], *row[1:]] for row in rows],
        )
    return tables


def figure(data: dict[str, Any], path: Path) -> None:
    """A bar of parts per kind of step, and one of the floor's parts below it."""
    bars: dict[str, dict[str, float]] = {}
    for kind, found in data["steps"].items():
        bars[kind] = {part: values["s"] * 1e3 for part, values in found["parts"].items()}
        if "server_s" in data:
            bars[kind]["server"] = max(0.0, data["server_s"]) * 1e3
        bars[f"floor, {kind}"] = {
            part: values["floor_s"] * 1e3 for part, values in found["parts"].items() if "floor_s" in values
        }
    title = f"{data['chapter'][:4]}, {data['workload']}: one step"
    plots.stack_figure(bars, path, title=title, xlabel="ms", shades=SHADES)


def profile(args: argparse.Namespace, package: str) -> dict[str, Any]:
    """Measure and return what the result file holds. Raises ValueError for a workload that cannot be run so."""
    checkpoint = resolve(args.model)
    scale = args.scale * (0.25 if args.quick and args.workload != "latency" else 1.0)
    workload = get(args.workload, checkpoint.vocab_size, scale, length_scale=args.length_scale)
    workload = encode_texts(workload, args.model)
    if args.http and workload.conversations:
        raise ValueError(f"{workload.name} has conversations, which do not go over HTTP here; leave --http out")
    options = {"model": args.model, "dtype": args.dtype, "threads": args.threads}
    settings = Settings(args.model, args.dtype, args.threads, warmup(checkpoint.vocab_size, args.length_scale))
    data: dict[str, Any] = {"machine": machine(checkpoint.config, settings)}
    rates = data["machine"]["bandwidth_gb_s"] * 1e9, data["machine"]["gemm_gflop_s"] * 1e9
    floor = Floor(checkpoint.config, args.dtype, *rates)
    engine = ChapterEngine(package, options)
    try:
        if args.http:
            flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
            with Server(package, *flags) as server:
                steps, runs = run(engine, workload, settings.warmup, args.rounds, server.url)
        else:
            steps, runs = run(engine, workload, settings.warmup, args.rounds)
    finally:
        engine.close()
    data |= {"chapter": package, "workload": workload.name, "description": workload.description}
    data["steps"] = {kind: breakdown(some, floor) for kind, some in kinds(steps).items()}
    data["clock_costs"] = ratio(runs["clocked"], runs["plain"], "total_s")
    data["plain"] = _totals(runs["plain"])
    if "http" in runs:
        data["http_ratio"] = summarise(h.total_s / p.total_s for h, p in zip(runs["http"], runs["plain"], strict=True))
        data["server_s"] = summarise(
            (h.total_s - p.total_s) / p.counters["steps"] for h, p in zip(runs["http"], runs["plain"], strict=True)
        )["median"]
    return data


def _totals(runs: Sequence[RunResult]) -> dict[str, Any]:
    keys = ["total_s", "output_tok_s", "ttft_s"] + ["tpot_s"] * all(run.tpot_s is not None for run in runs)
    return {key: summarise(run.metric(key) for run in runs) for key in keys}


def _flags() -> cli.Parser:
    parser = cli.parser("common.profile", "One step of a chapter's engine taken apart, next to the machine's floor.")
    add = parser.add_argument
    add("chapter", help="8, ch08 or the folder's name")
    add("--workload", default="offline", choices=list(BUILDERS), help="what is run (default: offline)")
    add("--grid", action="store_true", help="a decode step against batch and context instead of a workload")
    add("--http", action="store_true", help="run it through the chapter's server too, and say what that adds to a step")
    add("--rounds", type=int, metavar="N", help="runs with and without the clock (default: 3, 1 with --quick)")
    add("--quick", action="store_true", help="a quarter of the requests, one round; a small grid")
    add("--scale", type=float, default=1.0, metavar="X", help="factor on the number of requests (default: 1)")
    add("--length-scale", type=float, default=1.0, metavar="X", help="factor on all lengths (default: 1)")
    add("--batches", type=int, nargs="+", metavar="N", help="of the grid (default: 1 4 16 64)")
    add("--contexts", type=int, nargs="+", metavar="N", help="of the grid (default: 128 512 2000 8000)")
    add("--model", default="smollm2-135m", help="local folder, Hub id or preset")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add("--threads", type=int, default=2, help="compute threads (default: 2)")
    add("--json", metavar="FILE", help=f"the result (default: below {OUT})")
    add("--figures", metavar="FOLDER", default=str(OUT), help=f"where the figure goes (default: {OUT})")
    return parser


def main() -> int:
    args = _flags().parse_args()
    chapter = find(load_all(ROOT), args.chapter)
    if not (chapter.folder / "model.py").is_file():
        raise ValueError(f"{chapter.name} has no model: there is nothing to take apart")
    if args.http and not (chapter.folder / "serve.py").is_file():
        raise ValueError(f"{chapter.name} has no server: leave --http out")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if native_bfloat16() else "float32"
    args.rounds = args.rounds or (1 if args.quick else 3)
    if args.rounds < 1 or args.threads < 1:
        raise ValueError("rounds and threads must be at least 1")
    short = chapter.name[:4]
    name = f"{short}_{'grid' if args.grid else args.workload}"
    path = Path(args.figures) / f"profile_{name}.png" if args.figures else None
    if args.grid:
        from common import profile_grid

        data = profile_grid.measure(args, chapter.name)
        data["tables"] = profile_grid.report(data)
        draw = profile_grid.figure
    else:
        data = profile(args, chapter.name)
        data["tables"] = report(data)
        draw = figure
        cost = data["clock_costs"]["median"]
        print(f"the clock: a run with it takes {cost:.2f} times as long as one without (below 1 is noise)")
    target = Path(args.json or OUT / f"profile_{name}.json")
    save_result(target, data, threads=args.threads)
    print(f"result: {target}")
    if path:
        draw(data, path)
        print(f"figure: {path}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
