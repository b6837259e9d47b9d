"""Experiment: the same KV memory in pages instead of slots of full length, and what the indirection costs."""

from __future__ import annotations

import random
from typing import Any

from common import cli, plots
from common.checkpoints import resolve
from common.experiments import Experiment, milliseconds, start, table
from common.harness import Worker, interleave, parent_of, ratio, summarise
from common.workloads import Request, Workload, get

SLOTS = 8  # the budget: this many requests of full length
ZH = {"pages": "页", "slots": "槽位", ", TPOT": "，TPOT", ", output": "，输出"}


def main() -> int:
    bench = start(f"{__package__}.bench", "Paged KV cache against slots of full length.")
    parent = parent_of(str(__package__))
    assert parent is not None
    bench.data["tables"] = {}
    _pressure(bench, parent)
    _indirection(bench, parent)
    _page_sizes(bench)
    return bench.finish()


def decode_heavy(count: int) -> Workload:
    """Short prompts and long answers of mixed length: memory fills while requests run."""
    rng = random.Random(7)
    pool = get("offline").requests
    requests = []
    for i in range(count):
        prompt = (pool[i % len(pool)].prompt_ids * 4)[: rng.randint(16, 32)]
        requests.append(Request(prompt, rng.randint(64, 256)))
    return Workload("decode_heavy", tuple(requests), f"{count} requests, in 16–32, out 64–256, all at once")


def token_bytes(bench: Experiment) -> int:
    """Bytes of keys and values of one token."""
    config = resolve(bench.args.model).config
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    size = {"float32": 4, "bfloat16": 2}[bench.dtype]
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * dim * size


def _pressure(bench: Experiment, parent: str) -> None:
    """Fixed memory: concurrency reached, throughput, utilisation."""
    memory = SLOTS * 2048 * token_bytes(bench)
    options: dict[str, Any] = bench.options | {"kv_memory": str(memory), "max_running": 64}
    rounds = 1 if bench.quick else 3
    workloads = [decode_heavy(12 if bench.quick else 64), get("offline", scale=0.2 if bench.quick else 1.0)]
    rows = []
    with Worker(__package__, **options) as ours, Worker(parent, **options) as slots:
        for workload in workloads:
            runs = interleave({"ch07 pages": ours, "ch06 slots": slots}, workload, rounds, peaks=True)
            gain = ratio(runs["ch07 pages"], runs["ch06 slots"], "output_tok_s")
            bench.data[workload.name] = {"throughput_ratio": gain} | {
                name: {
                    "output_tok_s": summarise(run.output_tok_s for run in some),
                    "running": max(run.peaks["running"] for run in some),
                    "kv_used": max(run.peaks["kv_used"] for run in some),
                    "kv_total": some[0].peaks["kv_total"],
                    "preemptions": some[0].counters["preemptions"],
                }
                for name, some in runs.items()
            }
            for name in runs:
                found = bench.data[workload.name][name]
                rows.append([workload.name, name, found["running"], f"{found['output_tok_s']['median']:.0f}"])
    bench.data["tables"]["pressure"] = table(
        ["workload", "cache", "requests at once", "output tok/s"],
        ["负载", "缓存", "同时运行的请求", "输出 tok/s"],
        rows,
        words=ZH,
    )
    _utilisation(bench, parent)


def _utilisation(bench: Experiment, parent: str) -> None:
    """Under a pool that is too small: how much of it holds tokens, step by step, in process."""
    import importlib

    tokens = 2 * 2048 if not bench.quick else 2048
    series: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for name, package in (("ch07 pages", str(__package__)), ("ch06 slots", parent)):
        chapter = importlib.import_module(package)
        options: dict[str, Any] = bench.options | {"kv_memory": str(tokens * token_bytes(bench)), "max_running": 64}
        points, held = [], []
        with chapter.LLM(**options) as llm:
            workload = decode_heavy(12 if bench.quick else 96)
            for request in workload.requests:
                params = chapter.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
                llm.add(list(request.prompt_ids), params)
            while llm.has_work():
                llm.step()
                stats = llm.stats()
                running = llm.engine.scheduler.running
                if stats["waiting"]:  # while requests wait, memory that holds nothing is wasted
                    points.append((float(stats["steps"]), stats["kv_used"] / stats["kv_total"]))
                size = llm.engine.kv.page_size
                held += [len(req.pages) * size - req.cached_len for req in running]
        series[name] = points
        used = summarise(share for _, share in points)
        bench.data.setdefault("utilisation", {})[name] = {"share": used, "unused_slots": summarise(held)}
        rows.append([name, f"{used['median']:.1%}", f"{sum(held) / len(held):.1f}", max(held)])
    bench.data["tables"]["utilisation"] = table(
        ["cache", "pool in use while requests wait (median)", "unused positions per request (mean)", "at most"],
        ["缓存", "有请求等待时内存池的利用率（中位数）", "每个请求未用的位置（平均）", "最多"],
        rows,
        words=ZH,
    )
    if path := bench.figure("ch07_utilisation.png"):
        plots.line_figure(
            series, path, title="Share of the KV memory that holds tokens", xlabel="step", ylabel="share in use"
        )


def _indirection(bench: Experiment, parent: str) -> None:
    """No pressure: what pages cost."""
    rounds = 2 if bench.quick else 7
    rows = []
    with Worker(__package__, **bench.options) as ours, Worker(parent, **bench.options) as slots:
        for name, key in (("latency", "tpot_s"), ("offline", "output_tok_s")):
            workload = get(name, scale=0.2) if bench.quick and name == "offline" else get(name)
            runs = interleave({"ch07": ours, "ch06": slots}, workload, rounds)
            found = ratio(runs["ch07"], runs["ch06"], key)
            bench.data[f"{name}_ratio"] = found
            values = [summarise(run.metric(key) for run in runs[engine])["median"] for engine in ("ch06", "ch07")]
            shown = [milliseconds(v) if key == "tpot_s" else f"{v:.0f}" for v in values]
            unit = "TPOT ms" if key == "tpot_s" else "output tok/s"
            rows.append([f"{name}, {unit}", *shown, f"{found['median']:.3f} ({found['min']:.3f}–{found['max']:.3f})"])
    bench.data["tables"]["indirection"] = table(
        ["no memory pressure", "ch06", "ch07", "ratio (range)"],
        ["内存充足时", "ch06", "ch07", "比值（范围）"],
        rows,
        words=ZH,
    )


def _page_sizes(bench: Experiment) -> None:
    sizes = [1, 16, 256] if bench.quick else [1, 4, 16, 64, 256]
    rows = []
    for size in sizes:
        with Worker(__package__, **bench.options, page_size=size) as worker:
            latency = interleave({"ch07": worker}, get("latency"), 1 if bench.quick else 3)["ch07"]
            offline = interleave({"ch07": worker}, get("offline", scale=0.2 if bench.quick else 0.5), 1)["ch07"]
        tpot = summarise(run.metric("tpot_s") for run in latency)["median"]
        rows.append([size, milliseconds(tpot), f"{offline[0].output_tok_s:.0f}", f"{(size - 1) / 2:.1f}"])
    bench.data["tables"]["page_sizes"] = table(
        ["page size", "latency TPOT ms", "offline output tok/s", "unused positions per request (expected)"],
        ["页大小", "latency TPOT ms", "offline 输出 tok/s", "每个请求未用的位置（期望）"],
        rows,
    )


if __name__ == "__main__":
    cli.run_main(main)
