"""Experiment: requests share steps. One at a time, static and continuous batches; transformers; HTTP under load."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from common import cli, gantt, plots
from common.experiments import Experiment, milliseconds, start, table
from common.harness import RunResult, Worker, interleave, parent_of, percentile, ratio, summarise
from common.load import poisson
from common.load_result import LoadResult
from common.online import interleave_loads
from common.trace import Tracer
from common.workloads import Request, Workload, get

from . import LLM, SamplingParams

OUTPUTS = (3, 8, 2, 10, 4, 6, 5, 7)  # tokens of the eight requests of the picture
ROWS = 16  # of a static batch
ZH = {
    "one at a time": "逐个处理",
    "static batches of ": "静态批次，每批 ",
    "continuous batching": "连续批处理",
    "continuous, ": "连续批处理，",
    " places": " 个位置",
    " (default)": "（默认）",
    "transformers, ": "transformers，",
}


def main() -> int:
    bench = start(
        f"{__package__}.bench", "Continuous batching against static batches, one at a time, and transformers."
    )
    bench.data["tables"] = {}
    bench.machine()
    _example(bench)
    _offline(bench)
    _inter_token_latency(bench)
    _over_http(bench)
    return bench.finish()


# ---- eight requests, four places: a picture, and numbers that no machine changes


def _example(bench: Experiment) -> None:
    modes: dict[str, dict[str, Any]] = {
        "one at a time": {"max_running": 1},
        "static batches of 4": {"max_running": 4, "scheduler": "static"},
        "continuous, 4 places": {"max_running": 4},
    }
    runs = []
    for name, options in modes.items():
        tracer = Tracer()
        with LLM("dummy:llama-tiny", tracer, dtype="float32", threads=1, max_batch_tokens=64, **options) as llm:
            params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in OUTPUTS]
            llm.generate([[20 + i] * 6 for i in range(len(OUTPUTS))], params, progress=False)
        run = gantt.run_of(name, tracer.events, options["max_running"])
        run.title = f"{name}: {run.steps} steps, {run.occupancy:.1%} of the places used"
        runs.append(run)
    bench.data["example"] = {
        name: {"steps": run.steps, "occupancy": run.occupancy} for name, run in zip(modes, runs, strict=True)
    }
    bench.data["tables"]["example"] = table(
        ["mode", "steps", "share of the places used"],
        ["方式", "步数", "位置利用率"],
        [[name, run.steps, f"{run.occupancy:.1%}"] for name, run in zip(modes, runs, strict=True)],
        words=ZH,
    )
    if path := bench.figure("ch06_gantt.png"):
        gantt.draw(runs, path)


# ---- workload offline


def _offline(bench: Experiment) -> None:
    workload = get("offline", scale=0.25, length_scale=0.125) if bench.quick else get("offline")
    short = get("offline", scale=1 / 16, length_scale=0.25)
    rounds = 1 if bench.quick else 3
    rows = 4 if bench.quick else ROWS
    ours: dict[str, dict[str, Any]] = {
        "one at a time": {"max_running": 1},
        f"static batches of {rows}": {"max_running": rows, "scheduler": "static"},
        f"continuous, {rows} places": {"max_running": rows},
    }
    with Worker(__package__, **bench.options) as best, Worker("hf", batch=rows, **bench.options) as static:
        pair = {"ch06": best, f"transformers, static batches of {rows}": static}
        runs = _warm_then_interleave(pair, workload, short, rounds)
    for name, options in ours.items():
        with Worker(__package__, **bench.options, **options) as worker:
            runs |= _warm_then_interleave({name: worker}, workload, short, 1)
    more: dict[str, tuple[float, dict[str, Any]]] = {
        "continuous batching": (0.25, {"continuous": True}),
        "one at a time": (0.125, {}),
    }
    for name, (scale, options) in () if bench.quick else more.items():
        some = replace(workload, requests=workload.requests[: int(len(workload.requests) * scale)])
        with Worker("hf", **bench.options, **options) as worker:
            runs |= _warm_then_interleave({f"transformers, {name}": worker}, some, short, 1)
    places = {"one at a time": 1, **dict.fromkeys(list(ours)[1:], rows), "ch06": 64}
    _modes(bench, runs, places)
    _peers(bench, runs)


def _warm_then_interleave(
    workers: dict[str, Worker], workload: Workload, short: Workload, rounds: int
) -> dict[str, list[RunResult]]:
    """interleave, with a few small requests as warm-up: a whole unmeasured run of the slow ones would take minutes."""
    for worker in workers.values():
        worker.run(short)
    return interleave(workers, workload, rounds, warmup=0)


def _modes(bench: Experiment, runs: dict[str, list[RunResult]], places: dict[str, int]) -> None:
    rows: list[list[object]] = []
    found: dict[str, dict[str, Any]] = {}
    for name, count in places.items():
        run = runs[name][0]
        steps = run.counters["steps"]
        ttft = [r.ttft_s for r in run.requests]
        found[name] = {
            "places": count,
            "steps": steps,
            "occupancy": run.output_tokens / (steps * count),
            "output_tok_s": summarise(r.output_tok_s for r in runs[name]),
            "ttft_s": {"p50": percentile(ttft, 50), "p90": percentile(ttft, 90), "max": max(ttft)},
        }
        shown = f"continuous, {count} places (default)" if name == "ch06" else name
        points = [milliseconds(value) for value in found[name]["ttft_s"].values()]
        speed = f"{found[name]['output_tok_s']['median']:.0f}"
        rows.append([shown, f"{steps:,}", f"{found[name]['occupancy']:.1%}", speed, *points])
    bench.data["modes"] = found
    bench.data["tables"]["modes"] = table(
        ["mode", "steps", "places that gave a token", "output tok/s", "TTFT p50 ms", "TTFT p90 ms", "TTFT max ms"],
        ["方式", "步数", "产出 token 的位置", "输出 tok/s", "TTFT p50 ms", "TTFT p90 ms", "TTFT 最大 ms"],
        rows,
        words=ZH,
    )


def _peers(bench: Experiment, runs: dict[str, list[RunResult]]) -> None:
    static = next(name for name in runs if name.startswith("transformers, static"))
    against = ratio(runs["ch06"], runs[static], "output_tok_s")
    bench.data["tok_s_ratio_hf_static16"] = against
    ours = summarise(run.output_tok_s for run in runs["ch06"])["median"]
    rows = []
    for name in ("ch06", *(name for name in runs if name.startswith("transformers"))):
        speed = summarise(run.output_tok_s for run in runs[name])
        bench.data.setdefault("peers", {})[name] = speed | {"requests": len(runs[name][0].requests)}
        times = against["median"] if name == static else ours / speed["median"]
        rows.append([name, len(runs[name][0].requests), f"{speed['median']:.0f}", f"{times:.2f}"])
    bench.data["tables"]["peers"] = table(
        ["engine", "requests", "output tok/s", "ch06 is faster by"],
        ["引擎", "请求数", "输出 tok/s", "ch06 是它的几倍"],
        rows,
        words=ZH,
    )
    print(f"output tokens/s, ch06 / {static}: {against['median']:.2f} ({against['min']:.2f}–{against['max']:.2f})")


# ---- gaps between the tokens of running requests while long prompts arrive


def _inter_token_latency(bench: Experiment) -> None:
    """For several numbers of running requests: a step that is short without a chunk grows by more with one."""
    counts, out, long = ((4,), 24, 400) if bench.quick else ((16, 32, 64), 96, 2000)
    ids = get("latency", length_scale=long / 128).requests[0].prompt_ids
    rows = []
    with (
        Worker(__package__, **bench.options, max_running=counts[-1] + 2) as chunked,
        Worker(__package__, **bench.options, max_running=counts[-1] + 2, max_batch_tokens=long + counts[-1]) as whole,
    ):
        for running in counts:
            base, found = _while_prompts_arrive(chunked, whole, running, out, ids, rounds=1 if bench.quick else 3)
            points = {
                name: {key: summarise(round_[key] for round_ in some) for key in ("p50", "p99", "max")}
                for name, some in found.items()
            }
            ratios = {
                name: summarise(a["p99"] / b["p99"] for a, b in zip(found[name], found["alone"], strict=True))
                for name in ("chunks", "whole")
            }
            bench.data.setdefault("itl", {})[str(running)] = {
                "workload": f"{base.description}; two prompts of {long} arrive", "points_s": points, "p99_ratio": ratios,
            }  # fmt: skip
            p99 = {name: milliseconds(some["p99"]["median"]) for name, some in points.items()}
            share = {name: f"{ratio['median']:.2f}" for name, ratio in ratios.items()}
            rows.append([running, p99["alone"], p99["chunks"], share["chunks"], p99["whole"], share["whole"]])
    bench.data["tables"]["itl"] = table(
        ["running", "alone, gap p99 ms", "in chunks", "ratio", "in one step", "ratio"],
        ["运行中", "没有新提示，间隔 p99 ms", "分段", "比值", "一步算完", "比值"],
        rows,
    )


def _while_prompts_arrive(
    chunked: Worker, whole: Worker, running: int, out: int, ids: tuple[int, ...], rounds: int
) -> tuple[Workload, dict[str, list[dict[str, float]]]]:
    """The workload of running requests, and their gaps alone and while two prompts of ``ids`` arrive, per round."""
    base = Workload(
        "running", tuple(Request(ids[i : i + 64], out) for i in range(running)), f"{running} requests, 64 in, {out} out"
    )
    total = chunked.run(base).total_s  # also a warm-up
    whole.run(base)
    arrivals = tuple(Request(ids, 2, total * share) for share in (0.35, 0.65))
    busy = Workload("arriving", base.requests + arrivals, base.description)
    found: dict[str, list[dict[str, float]]] = {"alone": [], "chunks": [], "whole": []}
    for _ in range(rounds):
        found["alone"].append(_gaps(chunked.run(base), running))
        found["chunks"].append(_gaps(chunked.run(busy), running))
        found["whole"].append(_gaps(whole.run(busy), running))
    return base, found


def _gaps(run: RunResult, running: int) -> dict[str, float]:
    """Gaps between tokens of the first ``running`` requests, from when all of them decode; seconds."""
    some = run.requests[:running]
    begun = max(r.ttft_s for r in some)
    gaps = []
    for r in some:
        starts = accumulate(r.itl_s, initial=r.ttft_s)
        gaps += [gap for start_s, gap in zip(starts, r.itl_s, strict=False) if start_s >= begun]
    return {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99), "max": max(gaps)}


# ---- over HTTP


def _over_http(bench: Experiment) -> None:
    parent = parent_of(str(__package__))
    assert parent is not None
    online = get("online", scale=0.15, length_scale=0.25) if bench.quick else get("online")
    counts = {2.0: 6, 8.0: 6} if bench.quick else {1.0: 5, 2.0: 0, 4.0: 16, 8.0: 24}
    loads = {
        rate: poisson(replace(online, requests=online.requests[:count]), rate) if count else online
        for rate, count in counts.items()
    }
    warm = replace(online, requests=tuple(replace(r, arrival_s=0.0, max_tokens=8) for r in online.requests[:3]))
    flags = [f"--{key}={value}" for key, value in bench.options.items()]
    chapters = {"ch05": parent, "ch06": str(__package__)}
    first = {2.0: loads.pop(2.0)}
    results = interleave_loads(chapters, flags, [*first.values(), *loads.values()], warm)
    _online(bench, {name: some[0] for name, some in results.items()})
    by_rate = {
        name: dict(sorted(zip([*first, *loads], some, strict=True), key=lambda item: item[0]))
        for name, some in results.items()
    }
    _load(bench, by_rate)


def _online(bench: Experiment, results: dict[str, LoadResult]) -> None:
    bench.data["online"] = {name: result.totals() for name, result in results.items()}
    rows = []
    for name, result in results.items():
        total = result.totals()
        ttft = [milliseconds(total["ttft_s"][key]) for key in ("p50", "p90", "max")]
        tpot = milliseconds(total["tpot_s"]["p50"]) if total["tpot_s"] else "–"
        rows.append([name, *ttft, tpot, milliseconds(total["e2e_s"]["p50"]), f"{total['output_tok_s']:.1f}"])
    bench.data["tables"]["online"] = table(
        ["server", "TTFT p50 ms", "TTFT p90 ms", "TTFT max ms", "TPOT p50 ms", "end to end p50 ms", "output tok/s"],
        ["服务器", "TTFT p50 ms", "TTFT p90 ms", "TTFT 最大 ms", "TPOT p50 ms", "端到端 p50 ms", "输出 tok/s"],
        rows,
    )


def _load(bench: Experiment, by_rate: dict[str, dict[float, LoadResult]]) -> None:
    bench.data["load"] = {
        name: {f"{rate:g}": result.totals() for rate, result in some.items()} for name, some in by_rate.items()
    }
    rows: list[list[Any]] = []
    for rate in by_rate["ch06"]:
        cells: list[Any] = [f"{rate:g}", by_rate["ch06"][rate].totals()["requests"]]
        for key in ("output_tok_s", "ttft_s"):
            for name in by_rate:
                value = by_rate[name][rate].totals()[key]
                cells.append(f"{value:.1f}" if key == "output_tok_s" else milliseconds(value["p90"]))
        rows.append(cells)
    bench.data["tables"]["load"] = table(
        [
            "requests/s offered",
            "requests",
            "ch05 output tok/s",
            "ch06 output tok/s",
            "ch05 TTFT p90 ms",
            "ch06 TTFT p90 ms",
        ],
        ["到达率（请求/秒）", "请求数", "ch05 输出 tok/s", "ch06 输出 tok/s", "ch05 TTFT p90 ms", "ch06 TTFT p90 ms"],
        rows,
    )
    if path := bench.figure("ch06_load.png"):
        plots.line_figure(
            {
                name: [(rate, result.totals()["output_tok_s"]) for rate, result in some.items()]
                for name, some in by_rate.items()
            },
            path,
            title="Throughput by offered load",
            xlabel="offered load (requests/s)",
            ylabel="output tokens/s",
        )


if __name__ == "__main__":
    cli.run_main(main)
