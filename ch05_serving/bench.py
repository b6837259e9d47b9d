"""Experiment: what HTTP adds to a request, and what concurrent clients wait for while requests run one at a time."""

from __future__ import annotations

import statistics
import time

from common import cli, plots
from common.experiments import Experiment, milliseconds, start, table
from common.harness import Worker, summarise
from common.load import load
from common.service import Server
from common.workloads import Request, Workload, get


def main() -> int:
    bench = start(f"{__package__}.bench", "Latency over HTTP against in process, and under concurrent clients.")
    pairs, rounds = (1, 3) if bench.quick else (3, 11)
    ids = get("latency").requests[0].prompt_ids[:64]
    one = Workload("one", (Request(ids, 64),), "1 request, 64 in, 64 out")
    flags = [f"--{name}={value}" for name, value in bench.options.items()]
    inside: list[float] = []
    over: list[float] = []
    starts = []
    for pair in range(pairs):  # fresh processes: one may be faster than the next by some percent for its whole life
        begun = time.perf_counter()
        with Server(str(__package__), *flags) as server:
            load(server.url, Workload("first", (Request(ids, 1),), "1 token"))
            starts.append(time.perf_counter() - begun)
            with Worker(__package__, **bench.options) as worker:
                _in_turn(worker, server.url, one, rounds, inside, over)
            if pair == pairs - 1:
                _concurrency(bench, server.url, one)
    bench.data["start_to_first_answer_s"] = statistics.median(starts)
    _overhead(bench, inside, over)
    return bench.finish()


def _in_turn(worker: Worker, url: str, one: Workload, rounds: int, inside: list[float], over: list[float]) -> None:
    """The same request in process and over HTTP in turn, so that a drift of the machine hits both."""
    worker.run(one)
    load(url, one)
    for _ in range(rounds):
        inside.append(worker.run(one).e2e_s)
        over += load(url, one).values("e2e_s")


def _overhead(bench: Experiment, inside: list[float], over: list[float]) -> None:
    ratios = summarise(b / a for a, b in zip(inside, over, strict=True))
    bench.data |= {"in_process_s": summarise(inside), "http_s": summarise(over), "http_ratio": ratios}
    bench.data.setdefault("tables", {})["overhead"] = table(
        ["64-token answer", "median ms", "range ms"],
        ["64 个 token 的回答", "中位数 ms", "范围 ms"],
        [
            [name, milliseconds(statistics.median(times)), f"{milliseconds(min(times))}–{milliseconds(max(times))}"]
            for name, times in (("in process", inside), ("over HTTP", over))
        ],
        rows_zh=[
            [name, milliseconds(statistics.median(times)), f"{milliseconds(min(times))}–{milliseconds(max(times))}"]
            for name, times in (("进程内", inside), ("经 HTTP", over))
        ],
    )
    print(f"HTTP / in process: {ratios['median']:.3f} ({ratios['min']:.3f}–{ratios['max']:.3f})")


def _concurrency(bench: Experiment, url: str, one: Workload) -> None:
    """Closed loop: each client sends its next request when its last one is answered."""
    clients = [1, 2, 4] if bench.quick else [1, 2, 4, 8, 16]
    found = []
    for count in clients:
        requests = one.requests * (2 * count if bench.quick else 3 * count)
        result = load(url, Workload(f"clients-{count}", requests, f"{count} clients"), concurrency=count)
        if result.errors:
            raise RuntimeError(f"requests failed: {result.errors}")
        found.append((count, result.points("ttft_s"), result.points("e2e_s"), result.totals()["output_tok_s"]))
    bench.data["clients"] = [
        {"clients": n, "ttft_s": ttft, "e2e_s": e2e, "output_tok_s": rate} for n, ttft, e2e, rate in found
    ]
    bench.data.setdefault("tables", {})["clients"] = table(
        ["clients", "TTFT p50 ms", "end to end p50 ms", "end to end p99 ms", "output tok/s"],
        ["并发客户端", "TTFT p50 ms", "端到端 p50 ms", "端到端 p99 ms", "输出 tok/s"],
        [
            [n, milliseconds(ttft["p50"]), milliseconds(e2e["p50"]), milliseconds(e2e["p99"]), f"{rate:.0f}"]
            for n, ttft, e2e, rate in found
            if ttft and e2e
        ],
    )
    if path := bench.figure("ch05_clients.png"):
        series = {
            "ch05 end to end p50": [(n, e2e["p50"]) for n, _, e2e, _ in found if e2e],
            "ch05 TTFT p50": [(n, ttft["p50"]) for n, ttft, _, _ in found if ttft],
        }
        plots.line_figure(
            series,
            path,
            title="Requests run one at a time: every further client waits for all before it",
            xlabel="concurrent clients",
            ylabel="seconds",
        )


if __name__ == "__main__":
    cli.run_main(main)
