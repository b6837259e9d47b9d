"""Experiment: each token computed once instead of once per step, against the parent and against transformers."""

from __future__ import annotations

from common import cli, plots
from common.checkpoints import resolve
from common.experiments import Experiment, context_sweep, milliseconds, start, table
from common.harness import RunResult, Worker, interleave, parent_of, ratio, summarise
from common.workloads import Workload, get


def main() -> int:
    bench = start(f"{__package__}.bench", "KV cache against recomputation and against transformers.")
    machine = bench.machine()
    parent = parent_of(str(__package__))
    assert parent is not None
    workload = get("latency", length_scale=0.25) if bench.quick else get("latency")
    rounds = 1 if bench.quick else 5
    lengths = [32, 64, 128] if bench.quick else [32, 64, 128, 256, 512, 1024]
    engines = {"ch04": __package__, "ch03": parent, "hf": "hf"}
    with (
        Worker(engines["ch04"], **bench.options) as ours,
        Worker(parent, **bench.options) as recompute,
        Worker("hf", **bench.options) as theirs,
    ):
        runs = interleave({"ch04": ours, "hf": theirs}, workload, rounds)
        runs |= interleave({"ch03": recompute}, workload, 1 if bench.quick else 2)
        few = 1 if bench.quick else 3
        series = context_sweep({"ch04 KV cache": ours, "ch03 recompute": recompute}, lengths, 8, few)
    _latency(bench, workload, runs, bench.floors(workload, machine))
    bench.data["context"] = series
    names = list(series)
    bench.data["tables"]["context"] = table(
        ["context (tokens)", "ch03 TPOT ms", "ch04 TPOT ms"],
        ["上下文（token）", "ch03 TPOT ms", "ch04 TPOT ms"],
        [
            [length, milliseconds(slow), milliseconds(fast)]
            for (length, fast), (_, slow) in zip(series[names[0]], series[names[1]], strict=True)
        ],
    )
    _memory(bench, runs["ch04"][0])
    if path := bench.figure("ch04_tpot_context.png"):
        plots.tpot_vs_context(series, bench.floors(workload, machine)["tpot_s"], path)
    return bench.finish()


def _latency(bench: Experiment, workload: Workload, runs: dict[str, list[RunResult]], floor: dict[str, float]) -> None:
    against = ratio(runs["ch04"], runs["hf"], "tpot_s")
    bench.data["tpot_ratio_hf"] = against
    bench.data["floor"] = floor
    bench.data["latency"] = {
        name: {key: summarise(run.metric(key) for run in some) for key in ("ttft_s", "tpot_s", "e2e_s")}
        | {"counters": some[0].counters}
        for name, some in runs.items()
    }
    rows = []
    for name in ("ch03", "ch04", "hf"):
        found = bench.data["latency"][name]
        forwarded = f"{found['counters']['forwarded_tokens']:,}" if name != "hf" else "–"
        times = [milliseconds(found[key]["median"]) for key in ("ttft_s", "tpot_s", "e2e_s")]
        rows.append([name if name != "hf" else "transformers generate", forwarded, *times])
    rows.append(["floor", "–", milliseconds(floor["ttft_s"]), milliseconds(floor["tpot_s"]), "–"])
    bench.data["tables"] = {
        "latency": table(
            ["engine", "tokens forwarded", "TTFT ms", "TPOT ms", "end to end ms"],
            ["引擎", "前向计算的 token", "TTFT ms", "TPOT ms", "端到端 ms"],
            rows,
            rows_zh=[["下限" if r[0] == "floor" else r[0], *r[1:]] for r in rows],
        )
    }
    print(
        f"{workload.description}; TPOT ch04 / transformers: {against['median']:.2f} ({against['min']:.2f}–{against['max']:.2f})"
    )


def _memory(bench: Experiment, run: RunResult) -> None:
    """What it makes worse: bytes held per request, most of them unused."""
    config = resolve(bench.args.model).config
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[bench.dtype]
    per_token = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * dim * size
    total = run.counters.get("kv_total") or run.peaks.get("kv_total", 0)
    with Worker(__package__, **bench.options) as worker:
        total = total or worker.stats()["kv_total"]
    used = run.prompt_tokens + run.output_tokens - 1  # the last token is never computed
    bench.data["memory"] = {"bytes_per_token": per_token, "reserved_tokens": total, "used_tokens": used}
    bench.data["tables"]["memory"] = table(
        ["KV bytes per token", "reserved MB", "used MB at the end of latency", "used share"],
        ["每 token 的 KV 字节", "预留 MB", "latency 结束时占用 MB", "占用比例"],
        [[f"{per_token:,}", f"{per_token * total / 1e6:.1f}", f"{per_token * used / 1e6:.1f}", f"{used / total:.1%}"]],
    )


if __name__ == "__main__":
    cli.run_main(main)
