"""Experiment: one model over two ranks with a core each, against one rank with one core; what the ranks say to each other
and hold; what the extra process costs over HTTP; and what counted bytes and operations promise on GPUs."""

from __future__ import annotations

import importlib
import os
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import cli, plots
from common.checkpoints import resolve
from common.experiments import Experiment, milliseconds, start, table
from common.harness import Worker, interleave, parent_of, ratio, summarise
from common.host import BYTES, parameter_counts
from common.load import load
from common.service import Server, group
from common.tiny import cached_tiny_model
from common.workloads import Request, Workload, get

MODEL = "dummy:qwen3-0.6b"  # large enough for a product to outweigh a message
PREFILL = 512
BATCHES = (1, 16, 64)
SMALLER = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}  # for --quick
SHARED_MEMORY = {"gloo": "off", "shared memory": "auto"}  # way of the sums -> $MINISGL_SHARED_MEMORY
ZH = {"prefill": "预填充", "decode": "解码", "shared memory": "共享内存"}


def main() -> int:
    bench = start(f"{__package__}.bench", "Tensor parallelism: two ranks with one thread each against one.")
    bench.data["tables"] = {}
    parent = parent_of(str(__package__))
    assert parent is not None
    _scaling(bench)
    _communication(bench)
    _memory(bench)
    _one_rank(bench, parent)
    _hop(bench, parent)
    _projection(bench)
    return bench.finish()


# ---- scaling --------------------------------------------------------------------------------------------------------


def options(bench: Experiment, tp: int) -> dict[str, Any]:
    """One thread per rank; a budget that takes the whole prompt, and every prompt of a batch, in one step."""
    memory = {"kv_memory": "2G", "max_model_len": 1024, "max_batch_tokens": 2048, "prefix_cache": False}
    return {"model": MODEL, "dtype": bench.dtype, "threads": 1, "tp": tp, **memory}


def workloads(quick: bool) -> dict[str, Workload]:
    rng = random.Random(5)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5, 1000) for _ in range(length))

    found = {"prefill": Workload("prefill", (Request(prompt(PREFILL), 1),), f"1 request, {PREFILL} in, 1 out")}
    tokens = 8 if quick else 24
    for count in BATCHES[:2] if quick else BATCHES:
        requests = tuple(Request(prompt(16), tokens) for _ in range(count))
        found[f"decode {count}"] = Workload(f"decode-{count}", requests, f"{count} requests, 16 in, {tokens} out")
    return found


def _scaling(bench: Experiment) -> None:
    rounds = 1 if bench.quick else 7
    rows, gains = [], dict[str, Any]()
    with (
        Worker(str(__package__), **options(bench, 1)) as one,
        Worker(str(__package__), env={"MINISGL_SHARED_MEMORY": "off"}, **options(bench, 2)) as gloo,
        Worker(str(__package__), **options(bench, 2)) as shared,
    ):
        for name, workload in workloads(bench.quick).items():
            runs = interleave({"tp 1": one, "gloo": gloo, "shared memory": shared}, workload, rounds)
            key = "ttft_s" if name == "prefill" else "tpot_s"
            times = {kind: summarise(run.metric(key) for run in some) for kind, some in runs.items()}
            speed = {kind: ratio(runs["tp 1"], runs[kind], key) for kind in ("gloo", "shared memory")}
            sent = runs["shared memory"][0]
            bench.data[name] = {
                "seconds": times,
                "speedup": speed,
                "allreduce_bytes": sent.counters["allreduce_bytes"],
                "forwarded_tokens": sent.counters["forwarded_tokens"],
            }
            each = sent.counters["allreduce_bytes"] // sent.counters["forwarded_tokens"]
            bench.data["allreduce_bytes_per_token"] = each
            gains |= {f"{name}, {kind}": (f["median"], f["min"], f["max"]) for kind, f in speed.items()}
            cells = [milliseconds(times[kind]["median"]) for kind in times]
            ranges = [f"{s['median']:.2f} ({s['min']:.2f}–{s['max']:.2f})" for s in speed.values()]
            rows.append([name, *cells, *ranges])
    bench.data["tables"]["scaling"] = table(
        ["step", "tp 1, ms", "tp 2 gloo, ms", "tp 2 shared memory, ms", "gloo, ×", "shared memory, ×"],
        ["每步", "tp 1，ms", "tp 2 gloo，ms", "tp 2 共享内存，ms", "gloo，×", "共享内存，×"],
        rows,
        words=ZH,
    )
    if path := bench.figure("ch09_scaling.png"):
        title = "Speed of two ranks against one, one core each"
        plots.bar_figure(gains, path, title=title, xlabel="×", number=".2f", floor=1.0, floor_name="one rank")


# ---- what the ranks say to each other -------------------------------------------------------------------------------


@dataclass
class Spent:
    """Seconds of rank 0 inside one kind of collective, the wait for the other rank included."""

    calls: int = 0
    seconds: float = 0.0

    def wrap(self, method: Any) -> Any:
        def timed(*args: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                self.calls += 1
                self.seconds += time.perf_counter() - begun

        return timed


def _communication(bench: Experiment) -> None:
    """Share of rank 0's time in collectives, by wrapping them in this very process."""
    chapter = importlib.import_module(str(__package__))
    rows, before = [], os.environ.get("MINISGL_SHARED_MEMORY", "auto")
    for way, setting in SHARED_MEMORY.items():
        os.environ["MINISGL_SHARED_MEMORY"] = setting
        with chapter.LLM(**options(bench, 2)) as llm:
            for name, workload in workloads(bench.quick).items():
                found = _spent(chapter, llm, workload)
                bench.data.setdefault("communication", {})[f"{name}, {way}"] = found
                parts = [f"{found[part] / found['total_s']:.1%}" for part in ("all_reduce", "gather", "send")]
                rows.append([name, way, *parts, f"{found['bytes'] / found['steps'] / 1e6:.2f}"])
    os.environ["MINISGL_SHARED_MEMORY"] = before
    rows.sort(key=lambda row: list(workloads(bench.quick)).index(row[0]))
    bench.data["tables"]["communication"] = table(
        ["step", "way", "all-reduce", "gather", "broadcast", "MB all-reduced per step"],
        ["每步", "方式", "all-reduce", "gather", "broadcast", "每步 all-reduce 的 MB"],
        rows,
        words=ZH,
    )


def _spent(chapter: Any, llm: Any, workload: Workload) -> dict[str, float]:
    """Of the prefill step of one request, or of all decode steps of several. The second of two runs counts."""
    ranks, names = llm.engine.group, ("all_reduce", "gather", "send")
    for _ in range(2):
        spent = {name: Spent() for name in names}
        for r in workload.requests:
            llm.add(list(r.prompt_ids), chapter.SamplingParams(max_tokens=r.max_tokens, ignore_eos=True))
        if len(workload.requests) > 1 or workload.requests[0].max_tokens > 1:
            llm.step()  # all prompts
        before = {name: getattr(ranks, name) for name in names}
        for name, one in spent.items():
            setattr(ranks, name, one.wrap(before[name]))
        begun, bytes_before, steps = time.perf_counter(), ranks.bytes, 0
        while llm.has_work():
            llm.step()
            steps += 1
        total = time.perf_counter() - begun
        for name in names:
            delattr(ranks, name)  # the method of the class is there again
    found = {name: one.seconds for name, one in spent.items()}
    return found | {
        "total_s": total,
        "calls": spent["all_reduce"].calls,
        "bytes": ranks.bytes - bytes_before,
        "steps": steps,
    }


# ---- memory ---------------------------------------------------------------------------------------------------------


def anonymous_bytes(pid: int | str) -> int:
    """Memory of its own that a process has; the mapped file that weights are read from is not in it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def loading(model: str, tp: int, dtype: str) -> tuple[int, int]:
    """(after loading, highest while loading): bytes of its own of the largest of so many ranks."""
    flags = [
        f"--model={model}",
        f"--dtype={dtype}",
        "--threads=1",
        "--kv-memory=64M",
        "--max-model-len=128",
        f"--tp={tp}",
    ]
    # Freed memory goes back to the system at once, so that what a process has is what it uses.
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    server, over, seen = Server(str(__package__), *flags, env=exact), threading.Event(), {0: 0}

    def watch() -> None:
        while not over.wait(0.01):
            for pid in group(server.pid) if server.pid else ():
                with suppress(OSError, StopIteration):  # it ended meanwhile
                    seen[pid] = max(seen.get(pid, 0), anonymous_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with server:
            ranks = [pid for pid in group(server.pid) if pid != server.pid]
            after = max(anonymous_bytes(pid) for pid in ranks)
    finally:
        over.set()
        watcher.join()
    return after, max(seen[pid] for pid in ranks)


def _memory(bench: Experiment) -> None:
    """What a rank holds of a model, beyond what it holds of a tiny one."""
    model = str(cached_tiny_model("llama", **SMALLER)) if bench.quick else MODEL
    counts = parameter_counts(resolve(model).config)
    # Where the head is the embedding matrix on disk, a rank has its share of the rows twice: packed, and to look up.
    lookup = counts["head"] * (not counts["embedding"])
    whole = (sum(counts.values()) + lookup) * BYTES[bench.dtype]
    empty, _ = loading("dummy:llama-tiny", 1, bench.dtype)
    rows, of_one = [], None
    for tp in (1, 2, 4):
        held, most = (n - empty for n in loading(model, tp, bench.dtype))
        of_one = of_one or (held, most)
        shares = {"rank_share": held / of_one[0], "peak_share": most / of_one[1]}
        bench.data.setdefault("memory", {})[f"tp{tp}"] = {"rank_bytes": held, "peak_bytes": most, **shares}
        parts = [f"{n / 1e6:.0f}" for n in (whole / tp, held, most)]
        rows.append([tp, *parts, *(f"{share:.2f}" for share in shares.values())])
    bench.data["memory"]["weights_bytes"] = whole
    bench.data["tables"]["memory"] = table(
        ["tp", "weights / tp, MB", "a rank holds, MB", "at most while loading, MB", "holds, of tp 1", "most, of tp 1"],
        ["tp", "权重 / tp，MB", "每个 rank 占用 MB", "加载时最多 MB", "占用，与 tp 1 之比", "最多时，与 tp 1 之比"],
        rows,
    )


# ---- what it costs where it does not help ---------------------------------------------------------------------------


def _one_rank(bench: Experiment, parent: str) -> None:
    """Two pairs of processes, started in either order: which one starts first can decide where its memory lies."""
    workload = get("latency", length_scale=0.5 if bench.quick else 1.0)
    runs: dict[str, list[Any]] = {"ch09": [], "ch08": []}
    for order in (str(__package__), parent), (parent, str(__package__)):
        with Worker(order[0], **bench.options) as first, Worker(order[1], **bench.options) as second:
            pair = {name.partition("_")[0]: worker for name, worker in zip(order, (first, second), strict=True)}
            for name, some in interleave(pair, workload, 2 if bench.quick else 7).items():
                runs[name] += some
    bench.data["tp1_tpot_ratio"] = ratio(runs["ch09"], runs["ch08"], "tpot_s")


def _hop(bench: Experiment, parent: str) -> None:
    """The same stream from both servers in turn: what crosses a process boundary is late by this much."""
    flags = [f"--{name}={value}" for name, value in bench.options.items()]
    one = Workload("stream", (Request(get("latency").requests[0].prompt_ids[:64], 64),), "1 request, 64 in, 64 out")
    times: dict[str, list[float]] = {"ch09": [], "ch08": []}
    with Server(str(__package__), *flags) as ours, Server(parent, *flags) as theirs:
        for i in range(4 if bench.quick else 16):
            order = [("ch09", ours.url), ("ch08", theirs.url)]
            for name, url in order if i % 2 else reversed(order):
                found = load(url, one).values("tpot_s")
                times[name] += found if i else []
    gaps = [a - b for a, b in zip(times["ch09"], times["ch08"], strict=True)]
    bench.data["hop_ms_per_token"] = summarise(1e3 * gap for gap in gaps)
    bench.data["http_tpot_s"] = {name: summarise(values) for name, values in times.items()}
    tp1 = bench.data["tp1_tpot_ratio"]
    bench.data["tables"]["cost"] = table(
        ["tp 1 against the parent", "ratio or ms", "range"],
        ["tp 1 与上一章相比", "比值或 ms", "范围"],
        [
            ["TPOT in process, ratio", *_range(tp1, ".3f")],
            ["per token over HTTP, ms more", *_range(bench.data["hop_ms_per_token"], ".2f")],
        ],
        rows_zh=[
            ["进程内 TPOT，比值", *_range(tp1, ".3f")],
            ["经 HTTP 每个 token 多出的 ms", *_range(bench.data["hop_ms_per_token"], ".2f")],
        ],
    )


def _range(found: dict[str, float], number: str) -> list[str]:
    return [f"{found['median']:{number}}", f"{found['min']:{number}}–{found['max']:{number}}"]


# ---- where the links are faster -------------------------------------------------------------------------------------

# Assumed, not measured. A device: half of an H100 SXM's dense bfloat16 peak, four fifths of its memory's rate.
GPU = {"flop_s": 0.5 * 989e12, "byte_s": 0.8 * 3.35e12}
LINKS = {  # bytes/s one way, seconds per all-reduce besides the bytes
    "NVLink 4": (450e9, 8e-6),
    "PCIe 5 x16": (55e9, 20e-6),
    "25 Gbit Ethernet": (3e9, 60e-6),
}


def projected(config: dict[str, Any], tokens: int, tp: int, link: tuple[float, float] | None) -> float:
    """Seconds of a step over so many tokens: the slower of products and weight reading, then the all-reduces, nothing
    hidden. A ring moves 2 (n - 1) / n of the bytes through every link. Attention and the head's gather are left out."""
    counts = parameter_counts(config)
    weights = counts["linear"] + counts["head"]
    compute = max(2 * counts["linear"] * tokens / GPU["flop_s"], 2 * weights / GPU["byte_s"]) / tp
    if tp == 1 or link is None:
        return compute
    reductions = 2 * config["num_hidden_layers"] + 1
    moved = 2 * (tp - 1) / tp * tokens * config["hidden_size"] * 2 / link[0]
    return compute + reductions * (link[1] + moved)


def _projection(bench: Experiment) -> None:
    """From counted bytes and operations alone; no such machine was used."""
    config = resolve("dummy:qwen3-14b").config
    rows = []
    for tokens, name in ((1, "decode 1"), (64, "decode 64"), (2048, "prefill 2048")):
        one = projected(config, tokens, 1, None)
        for link, speed in LINKS.items():
            gains = [f"{one / projected(config, tokens, tp, speed):.2f}" for tp in (2, 4, 8)]
            rows.append([name, link, milliseconds(one), *gains])
    links = {name: {"gb_s": rate / 1e9, "us": 1e6 * fixed} for name, (rate, fixed) in LINKS.items()}
    gpu = {"tflop_s": GPU["flop_s"] / 1e12, "tb_s": GPU["byte_s"] / 1e12}
    bench.data["projection"] = {"model": "qwen3-14b", "gpu": gpu, "links": list(links.values()), "names": list(links)}
    bench.data["tables"]["projection"] = table(
        ["step", "link", "tp 1, ms", "tp 2, ×", "tp 4, ×", "tp 8, ×"],
        ["每步", "互联", "tp 1，ms", "tp 2，×", "tp 4，×", "tp 8，×"],
        rows,
        words=ZH,
    )


if __name__ == "__main__":
    cli.run_main(main)
