"""Experiment: equal prefixes computed once, against the parent that computes them again for every request."""

from __future__ import annotations

import importlib
from typing import Any

from common import cli, plots
from common.experiments import Experiment, milliseconds, start, table
from common.harness import Worker, interleave, parent_of, ratio, summarise
from common.workloads import Request, Workload, get

NAMES_ZH = {
    "shared_prefix": "共享前缀",
    "few_shot": "少样本示例",
    "multi_turn": "多轮对话",
    "offline": "无共享（offline）",
}


def main() -> int:
    bench = start(f"{__package__}.bench", "Radix prefix cache against recomputed prefixes.")
    parent = parent_of(str(__package__))
    assert parent is not None
    bench.data["tables"] = {}
    _sharing(bench, parent)
    _counters(bench)
    _overhead(bench, parent)
    _eviction(bench)
    return bench.finish()


def few_shot(count: int) -> Workload:
    """One long block of examples, many short questions, short answers."""
    pool = get("shared_prefix").requests
    examples = (pool[0].prompt_ids * 2)[:768]
    requests = tuple(Request(examples + pool[i].prompt_ids[-24:], 4) for i in range(count))
    return Workload("few_shot", requests, f"{count} requests, 768 shared + 24 own, 4 out")


def _sharing(bench: Experiment, parent: str) -> None:
    rounds = 1 if bench.quick else 3
    workloads = [
        get("shared_prefix", scale=0.25) if bench.quick else get("shared_prefix"),
        few_shot(8 if bench.quick else 32),
        get("multi_turn", scale=0.25) if bench.quick else get("multi_turn"),
    ]
    rows = []
    for workload in workloads:
        # A fresh process per workload: what one leaves in the cache must not serve the next. The warm-up run would fill
        # it, so the cache is cold in the first measured round only; later rounds would measure repetition, not sharing.
        cold = {"ch08": [], "ch07": []}
        for _ in range(rounds):
            for name, package in (("ch08", str(__package__)), ("ch07", parent)):
                with Worker(package, **bench.options) as worker:
                    worker.run(get("latency", length_scale=0.25))
                    cold[name].append(worker.run(workload))
        found = ratio(cold["ch08"], cold["ch07"], "total_s")
        ours, theirs = cold["ch08"], cold["ch07"]
        prompt = ours[0].prompt_tokens
        hit = ours[0].counters["prefix_hit_tokens"]
        bench.data[workload.name] = {
            "total_ratio": found,
            "hit_rate": hit / prompt,
            "prefill_tokens": {
                "ch08": ours[0].counters["prefill_tokens"],
                "ch07": theirs[0].counters["prefill_tokens"],
            },
            "ttft_mean_s": {name: summarise(_mean_ttft(run) for run in some) for name, some in cold.items()},
            "total_s": {name: summarise(run.total_s for run in some) for name, some in cold.items()},
        }
        data = bench.data[workload.name]
        rows.append(
            [
                workload.name,
                f"{data['hit_rate']:.1%}",
                f"{data['prefill_tokens']['ch07']:,} → {data['prefill_tokens']['ch08']:,}",
                f"{milliseconds(data['ttft_mean_s']['ch07']['median'])} → {milliseconds(data['ttft_mean_s']['ch08']['median'])}",
                f"{data['total_s']['ch07']['median']:.2f} → {data['total_s']['ch08']['median']:.2f}",
                f"{found['median']:.2f}",
            ]
        )
    bench.data["tables"]["sharing"] = table(
        ["workload", "hit rate", "prefill tokens ch07 → ch08", "mean TTFT ms", "total s", "total, ratio"],
        ["负载", "命中率", "预填充 token ch07 → ch08", "平均 TTFT ms", "总时间 s", "总时间之比"],
        rows,
        rows_zh=[[NAMES_ZH[row[0]], *row[1:]] for row in rows],
    )
    if path := bench.figure("ch08_prefill.png"):
        values = {}
        for workload in workloads:
            for name in ("ch07", "ch08"):
                values[f"{name} {workload.name}"] = float(bench.data[workload.name]["prefill_tokens"][name])
        plots.bar_figure(values, path, title="Prefill tokens computed", xlabel="tokens", number=",.0f")


def _mean_ttft(run: Any) -> float:
    return sum(r.ttft_s for r in run.requests) / len(run.requests)


def _counters(bench: Experiment) -> None:
    """What must come out exactly: 32 requests sharing 512 of 544 tokens, all at once, with a budget of 4,096 tokens."""
    chapter = importlib.import_module(str(__package__))
    rows = []
    for name, cache in (("prefix cache", True), ("without", False)):
        with chapter.LLM(**bench.options, prefix_cache=cache, max_batch_tokens=4096) as llm:
            requests = get("shared_prefix").requests
            params = chapter.SamplingParams(max_tokens=1, ignore_eos=True)
            llm.generate([list(r.prompt_ids) for r in requests], params, progress=False)
            stats = llm.stats()
        rows.append([name, len(requests), f"{stats['prefill_tokens']:,}", f"{stats['prefix_hit_tokens']:,}"])
        bench.data[f"counters_{'on' if cache else 'off'}"] = stats
    bench.data["tables"]["counters"] = table(
        ["", "requests", "prefill tokens", "hit tokens"],
        ["", "请求数", "预填充 token", "命中 token"],
        rows,
        rows_zh=[["开启前缀缓存", *rows[0][1:]], ["关闭", *rows[1][1:]]],
    )


def _overhead(bench: Experiment, parent: str) -> None:
    """Nothing to share: what the tree costs."""
    workload = get("offline", scale=0.2) if bench.quick else get("offline")
    with Worker(__package__, **bench.options) as ours, Worker(parent, **bench.options) as theirs:
        # Every round brings other tokens, else the second round would find the first one's prompts.
        pairs: dict[str, list[Any]] = {"ch08": [], "ch07": []}
        for i in range(2 if bench.quick else 7):
            fresh = get("offline", scale=0.2 if bench.quick else 1.0, seed=100 + i)
            order = [("ch08", ours), ("ch07", theirs)]
            for name, worker in order if i % 2 else reversed(order):
                pairs[name] += interleave({name: worker}, fresh, 1, warmup=0)[name]
    found = ratio(pairs["ch08"], pairs["ch07"], "output_tok_s")
    bench.data["offline_ratio"] = found
    rates = [summarise(run.output_tok_s for run in pairs[name])["median"] for name in ("ch07", "ch08")]
    bench.data["tables"]["overhead"] = table(
        [f"no sharing ({workload.name})", "ch07 tok/s", "ch08 tok/s", "ratio (range)"],
        ["无共享（offline）", "ch07 tok/s", "ch08 tok/s", "比值（范围）"],
        [["", *(f"{r:.0f}" for r in rates), f"{found['median']:.3f} ({found['min']:.3f}–{found['max']:.3f})"]],
    )


def _eviction(bench: Experiment) -> None:
    """Time per evicted page against the size of the tree."""
    import random
    import time

    from .radix import RadixTree

    rows, points = [], []
    for count in (1_000, 10_000) if bench.quick else (1_000, 10_000, 100_000):
        rng = random.Random(count)
        tree = RadixTree(4)
        for node in range(count):
            prefix = [node % 97] * 4
            tree.insert(prefix + [rng.randrange(1 << 30) for _ in range(4)], [1_000_000 + node % 97, node])
        begun = time.perf_counter()
        evicted = sum(len(tree.evict(1)) for _ in range(count // 2))
        each = (time.perf_counter() - begun) / evicted
        points.append((count, each))
        rows.append([f"{count:,}", f"{each * 1e6:.2f}"])
    bench.data["eviction"] = [{"nodes": n, "s_per_page": s} for n, s in points]
    bench.data["tables"]["eviction"] = table(["nodes", "µs per evicted page"], ["节点数", "每淘汰一页的 µs"], rows)


if __name__ == "__main__":
    cli.run_main(main)
