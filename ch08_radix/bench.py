"""Experiment: equal prefixes computed once, against the parent that computes them again for every request."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from common import cli, plots, prefix_tree
from common.checkpoints import resolve
from common.experiments import Experiment, milliseconds, start, table
from common.harness import RunResult, Worker, interleave, parent_of, ratio, summarise
from common.workloads import Request, Workload, get

from .kvcache import token_bytes
from .model import ModelConfig

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
    if path := bench.figure("ch08_tree.png"):
        _tree(bench, path)
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
        cold: dict[str, list[RunResult]] = {"ch08": [], "ch07": []}
        for _ in range(rounds):
            for name, package in (("ch08", str(__package__)), ("ch07", parent)):
                with Worker(package, **bench.options) as worker:
                    worker.run(get("latency", length_scale=0.25))
                    cold[name].append(worker.run(workload))
        found = ratio(cold["ch08"], cold["ch07"], "total_s")
        ours, theirs = cold["ch08"], cold["ch07"]
        if workload.conversations:
            _turns(bench, workload, ours[0])
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


def _turns(bench: Experiment, workload: Workload, run: RunResult) -> None:
    """Per turn of the conversations what its prompt holds, and how much of that had to be computed: means in tokens."""
    rows, turns = [], len(workload.conversations[0].turns)
    for k in range(turns):
        asked = run.requests[k::turns]  # in the order of the conversations
        text = [len(talk.turns[k].user_ids) for talk in workload.conversations]
        computed = [r.prompt_tokens - r.cached_tokens for r in asked]
        prompt = [r.prompt_tokens for r in asked]
        more = [c - t for c, t in zip(computed, text, strict=True)]
        means = [f"{sum(values) / len(values):.1f}" for values in (prompt, text, computed)]
        rows.append([k + 1, *means, max(more)])
        bench.data.setdefault("turns", []).append({"prompt": prompt, "text": text, "computed": computed})
    bench.data["tables"]["turns"] = table(
        ["turn", "prompt", "of it new text", "computed", "computed beyond it, at most"],
        ["轮次", "提示词", "其中新文本", "计算的 token", "额外计算，最多"],
        rows,
    )


def _mean_ttft(run: RunResult) -> float:
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
    """Nothing to share: what the tree costs in a pool that has long been full, and in one that still grows."""
    full = ("96M" if bench.quick else "512M") if bench.dtype == "bfloat16" else ("192M" if bench.quick else "1G")
    rows, rows_zh = [], []
    for key, memory, name, name_zh in (
        ("offline_ratio", full, "full: each page was another's", "已满：每页都曾属于别的请求"),
        (
            "offline_growing_ratio",
            "auto",
            "growing: each page is touched for the first time",
            "增长中：每页都是首次写入",
        ),
    ):
        runs = _fresh_rounds(bench, parent, memory)
        found = ratio(runs["ch08"], runs["ch07"], "output_tok_s")
        last = runs["ch08"][-1].counters
        bench.data[key] = found | {"kv_total": last["kv_total"], "kv_cached": last["kv_cached"]}
        rates = [summarise(run.output_tok_s for run in runs[chapter])["median"] for chapter in ("ch07", "ch08")]
        cells = [*(f"{r:.0f}" for r in rates), f"{found['median']:.3f} ({found['min']:.3f}–{found['max']:.3f})"]
        rows.append([name, *cells])
        rows_zh.append([name_zh, *cells])
    bench.data["tables"]["overhead"] = table(
        ["offline, pool", "ch07 tok/s", "ch08 tok/s", "ratio (range)"],
        ["offline，页池", "ch07 tok/s", "ch08 tok/s", "比值（范围）"],
        rows,
        rows_zh=rows_zh,
    )


def _fresh_rounds(bench: Experiment, parent: str, memory: str) -> dict[str, list[RunResult]]:
    """Rounds of `offline`, each with other tokens, else the second round would find the first one's prompts."""
    scale, warmup = (0.2, 3) if bench.quick else (1.0, 3)
    runs: dict[str, list[RunResult]] = {"ch08": [], "ch07": []}
    options = bench.options | {"kv_memory": memory}
    with Worker(str(__package__), **options) as ours, Worker(parent, **options) as theirs:
        workers = [("ch08", ours), ("ch07", theirs)]
        for i in range(-warmup, 2 if bench.quick else 7):
            fresh = get("offline", scale=scale, seed=100 + i)
            for name, worker in workers if i % 2 else reversed(workers):
                [result] = interleave({name: worker}, fresh, 1, warmup=0)[name]
                if i >= 0:
                    runs[name].append(result)
    return runs


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


SYSTEM = (
    "You are a patient teacher of computer science. Answer in plain words, give one example that a beginner can follow, "
    "and say so when you do not know. Never make up sources, numbers or names. "
)
PROGRAM = "Here is a small program. Say in one sentence what it computes, and then name its worst fault:\n"
QUESTIONS = (
    SYSTEM + PROGRAM + "def mean(xs): return sum(xs) / len(xs)",
    SYSTEM + PROGRAM + "def last(xs): return xs[len(xs)]  # the last element of a list",
    SYSTEM + "What is a page table, and why does every operating system need one?",
    "Translate into French, word for word, and keep the punctuation as it is: the cat sat on the mat, and then it slept.",
)
FOLLOW_UP = " Thank you. And now write it again, but in a way that works for every list, the empty one included."
LONG = "How many words are these? " + "one two three four five six seven eight nine ten " * 12
PAGES, PAGE_SIZE = 40, 8  # of the pool: so small that the last request needs more than are free


def _tree(bench: Experiment, path: Path) -> None:
    """Draw the tree while requests run, after a conversation has gone on, and after others needed the pages."""
    chapter = importlib.import_module(str(__package__))
    config = ModelConfig.from_dict(resolve(bench.args.model).config)
    page = PAGE_SIZE * token_bytes(config.layers, config.kv_heads, config.head_dim, getattr(torch, bench.dtype))
    params = chapter.SamplingParams(max_tokens=24, ignore_eos=True)
    moments: list[tuple[str, Any]] = []
    with chapter.LLM(**bench.options, page_size=PAGE_SIZE, kv_memory=str(PAGES * page), max_batch_tokens=256) as llm:
        for question in QUESTIONS:
            llm.add(question, params)
        outputs = [llm.step() for _ in range(8)]
        moments.append(("Four requests run: what they hold is filled", prefix_tree.snapshot(llm)))
        while llm.has_work():
            outputs.append(llm.step())
        [first] = [o for some in outputs for o in some if o.prompt_token_ids == llm.tokenizer.encode(QUESTIONS[0])]
        turn = [*first.prompt_token_ids, *first.token_ids, *llm.tokenizer.encode(FOLLOW_UP)]
        llm.generate([turn], params, progress=False)
        moments.append(("All have ended, and the first has asked again", prefix_tree.snapshot(llm)))
        llm.generate([LONG], chapter.SamplingParams(max_tokens=1), progress=False)
        moments.append(
            ("Another prompt needed pages: the least recently used ends are gone", prefix_tree.snapshot(llm))
        )
    prefix_tree.figure(moments, path)


if __name__ == "__main__":
    cli.run_main(main)
