"""Experiment: is the output right, and what does it cost to recompute everything for every token?"""

from __future__ import annotations

from common import cli, plots
from common.experiments import Experiment, context_sweep, milliseconds, start, table
from common.harness import Worker, interleave, summarise
from common.workloads import Request, Workload, get


def main() -> int:
    bench = start(f"{__package__}.bench", "Correct tokens, and time per token that grows with the context.")
    machine = bench.machine()
    bench.data["tables"] = {"correctness": _correctness(bench)}
    workload = get("latency", length_scale=0.25) if bench.quick else get("latency")
    lengths = [32, 64, 128] if bench.quick else [32, 64, 128, 256, 512, 1024]
    with Worker(__package__, **bench.options) as worker:
        runs = interleave({"ch03": worker}, workload, 1 if bench.quick else 3)["ch03"]
        series = context_sweep({"ch03": worker}, lengths, 4 if bench.quick else 8, 1 if bench.quick else 3)
    floor = bench.floors(workload, machine)
    tpot, ttft = (summarise(run.metric(key) for run in runs) for key in ("tpot_s", "ttft_s"))
    counters = runs[0].counters
    bench.data |= {"latency": {"tpot_s": tpot, "ttft_s": ttft, "counters": counters, "floor": floor}, "context": series}
    bench.data["tables"]["latency"] = table(
        ["tokens in / out", "tokens forwarded", "TTFT ms", "TPOT ms", "TPOT floor ms"],
        ["输入 / 输出 token", "前向计算的 token", "TTFT ms", "TPOT ms", "TPOT 下限 ms"],
        [
            [
                f"{workload.prompt_tokens} / {workload.output_tokens}",
                f"{counters['forwarded_tokens']:,}",
                milliseconds(ttft["median"]),
                milliseconds(tpot["median"]),
                milliseconds(floor["tpot_s"]),
            ]
        ],
    )
    bench.data["tables"]["context"] = table(
        ["context (tokens)", "TPOT ms"],
        ["上下文（token）", "TPOT ms"],
        [[length, milliseconds(value)] for length, value in series["ch03"]],
    )
    if path := bench.figure("ch03_tpot_context.png"):
        plots.tpot_vs_context({"ch03 recompute": series["ch03"]}, floor["tpot_s"], path)
    return bench.finish()


def _correctness(bench: Experiment) -> dict[str, object]:
    """Greedy float32 tokens against transformers' generate on the same random prompts."""
    count, new = (2, 8) if bench.quick else (8, 32)
    draws = get("offline").requests[:count]
    requests = tuple(Request(r.prompt_ids[:96], new) for r in draws)
    workload = Workload("correctness", requests, f"{count} random prompts, {new} greedy tokens each")
    options = bench.options | {"dtype": "float32"}
    with Worker(__package__, **options) as ours, Worker("hf", **options) as theirs:
        a, b = ours.run(workload), theirs.run(workload)
    same = sum(x.token_ids == y.token_ids for x, y in zip(a.requests, b.requests, strict=True))
    bench.data["correctness"] = {"requests": count, "equal": same, "tokens": a.output_tokens}
    return table(
        ["requests", "tokens", "requests equal to transformers"],
        ["请求数", "token 数", "与 transformers 完全一致的请求"],
        [[count, a.output_tokens, same]],
    )


if __name__ == "__main__":
    cli.run_main(main)
