"""Everything that needs a GPU, in one command: are the kernels and graphs right on it, and how fast is the engine?

    python -m common.gpu_check [--chapter ch07_paged] [--model dummy:qwen3-0.6b] [--quick] [--json docs/results/gpu.json]

Exit status 0 if every check held, 1 if one did not, 2 without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from common import cli
from common.checkpoints import resolve
from common.experiments import milliseconds, table
from common.harness import RunResult, Worker, interleave, ratio, save_result, summarise
from common.host import floors, host_record, measure_bandwidth, measure_gemm
from common.kernel_cases import BOUNDS, Cases, Heads
from common.kernels_aot import SHAPES, latest_chapter
from common.workloads import get

DTYPE = "bfloat16"
GRAPH_BOUND = (
    3e-2  # of a row of logits: the batch is padded and attention split otherwise, so bfloat16 rounds elsewhere
)
ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"attention_backend": "torch", "native": "off", "cuda_graph": False},
    "kernels": {"attention_backend": "triton", "cuda_graph": False},
    "kernels and graphs": {"attention_backend": "triton"},
}


def check_kernels(chapter: str, device: str, cases: int, longest: int) -> list[dict[str, Any]]:
    """Worst relative error of a row per kernel and dtype, over random cases in the head shapes of real models."""
    kernels, ops = (importlib.import_module(f"{chapter}.{name}") for name in ("kernels", "ops"))
    worst: dict[tuple[str, str], float] = {}
    for seed in range(cases):
        for dtype in BOUNDS:
            for name, run in _draw(Cases(kernels, ops, seed, device), dtype, longest).items():
                try:
                    error = run()
                except AssertionError as reason:
                    print(f"{name}, {dtype}, seed {seed}: {reason}", file=sys.stderr)
                    error = float("inf")
                key = name, str(dtype).removeprefix("torch.")
                worst[key] = max(worst.get(key, 0.0), error)
    bounds = {str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items()}
    found = []
    for (name, kind), largest in worst.items():
        shown = largest if largest < float("inf") else None  # JSON has no infinity
        ok = largest <= bounds[kind]
        found.append({"kernel": name, "dtype": kind, "error": shown, "bound": bounds[kind], "ok": ok})
    return found


def _draw(case: Cases, dtype: torch.dtype, longest: int) -> dict[str, Callable[[], float]]:
    """One random case of every kernel."""
    rng = case.rng
    shape = rng.choice(SHAPES)
    heads = Heads(shape.kv_heads, shape.heads // shape.kv_heads, shape.dim)
    page, splits = rng.choice([1, 2, 16, 64, 256]), rng.choice([1, 2, 8, 32])
    lengths = [min(n, longest) for n in case.lengths(5, page, longest)]
    extends = [rng.choice([1, n, min(n, rng.randint(2, 9)), rng.randint(1, n)]) for n in lengths]
    extends[0] = max(2, extends[0]) if lengths[0] > 1 else 1
    rows = rng.randint(1, 300)
    ones = [1] * (len(lengths) + 1)
    return {
        "store_kv": lambda: case.store_kv(heads, dtype, page, rows, rng.randint(0, rows)),
        "paged_decode": lambda: case.attention(heads, dtype, page, [*lengths, 0], ones, splits),
        "paged_prefill": lambda: case.attention(heads, dtype, page, [*lengths, 9], [*extends, 5], splits),
        "add_rms_norm": lambda: case.add_rms_norm(dtype, rows, shape.hidden, residual=rng.random() < 0.5),
        "add_rms_norm of heads": lambda: case.add_rms_norm(dtype, rows, shape.dim, heads=shape.heads + shape.kv_heads),
        "rotary": lambda: case.rotary(dtype, rows, shape.heads + shape.kv_heads, shape.dim),
        "silu_and_mul": lambda: case.silu_and_mul(dtype, rows, shape.intermediate),
    }


def time_decode(chapter: str, bandwidth: float, context: int = 2048) -> list[dict[str, Any]]:
    """Paged decode in the shape of Llama-3.1-8B: seconds, and its share of the time that reading K and V takes."""
    from triton.testing import do_bench

    kernels, heads, kv_heads, dim, page = importlib.import_module(f"{chapter}.kernels"), 32, 8, 128, 16
    found = []
    for batch in (1, 8, 64):
        pages = batch * context // page
        k, v = (torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        order = torch.randperm(pages, device="cuda").int().view(batch, -1)
        lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        q = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)

        def run(q: Any = q, k: Any = k, v: Any = v, order: Any = order, lens: Any = lens) -> Any:
            return kernels.paged_decode(q, k, v, order, lens, dim**-0.5)

        seconds = do_bench(run, return_mode="median") * 1e-3
        floor = 2 * k.nbytes / bandwidth
        found.append({"batch": batch, "context": context, "seconds": seconds, "floor_share": floor / seconds})
    return found


def compare_graphs(llm: Any, params_class: Any, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Every decode step of batches of these sizes through a graph and eagerly: the largest relative error of a row.

    The step runs twice on the same inputs, which stores the same keys and values twice.
    """
    graphs = llm.engine.runner.graphs
    run, found = graphs.run, []

    def both(inp: Any) -> torch.Tensor | None:
        logits = run(inp)
        if logits is None:
            return None
        logits, eager = logits.clone(), graphs.forward(inp)
        error = (logits - eager).norm(dim=-1) / eager.norm(dim=-1)
        same = float((logits.argmax(-1) == eager.argmax(-1)).float().mean())
        found.append({"rows": len(logits), "error": float(error.max()), "same_argmax": same})
        return logits

    graphs.run = both
    try:
        for size in sizes:
            prompts = [[(31 * i + j) % 900 + 4 for j in range(5 + 7 * i)] for i in range(size)]
            llm.generate(prompts, params_class(max_tokens=12, ignore_eos=True), progress=False)
    finally:
        graphs.run = run
    steps = []
    for rows in sorted({step["rows"] for step in found}):
        same = [step for step in found if step["rows"] == rows]
        worst = max(step["error"] for step in same)
        agree = sum(step["same_argmax"] for step in same) / len(same)
        steps.append(
            {"rows": rows, "steps": len(same), "error": worst, "same_argmax": agree, "ok": worst <= GRAPH_BOUND}
        )
    return steps


def check_graphs(chapter: str, model: str) -> dict[str, Any]:
    """Graphs against eager steps, and what the graphs took."""
    module = importlib.import_module(chapter)
    with module.LLM(model, device="cuda", dtype=DTYPE, kv_memory="2G", max_running=16) as llm:
        steps = compare_graphs(llm, module.SamplingParams, (1, 3, 8, 13))
        graphs = llm.engine.runner.graphs
        print(graphs.summary())
        return {"steps": steps, "memory_bytes": graphs.memory_bytes, "capture_s": graphs.capture_s}


def measure(chapter: str, model: str, rounds: int) -> dict[str, dict[str, list[RunResult]]]:
    """Runs of both workloads: {workload: {engine: runs}}, the engines side by side on one GPU."""
    vocabulary = resolve(model).vocab_size
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                Worker(chapter, model=model, device="cuda", dtype=DTYPE, kv_memory="3G", **options)
            )
            for name, options in ENGINES.items()
        }
        # Two warm-ups: the first compiles kernels and captures graphs.
        return {name: interleave(workers, get(name, vocabulary), rounds, warmup=2) for name in ("latency", "offline")}


def speed_tables(model: str, results: dict[str, dict[str, list[RunResult]]]) -> dict[str, Any]:
    """Medians next to the floor of this GPU, and the ratios of each pair of runs."""
    bandwidth, flops = measure_bandwidth(1, "cuda"), measure_gemm(DTYPE, device="cuda", size=8192)
    config = resolve(model).config
    lows = {name: floors(config, DTYPE, bandwidth, flops, get(name, config["vocab_size"])) for name in results}
    rows, ratios = [], {}
    for name in ENGINES:
        one, many = results["latency"][name], results["offline"][name]
        medians = [summarise(r.metric(key) for r in one)["median"] for key in ("ttft_s", "tpot_s")]
        rate = summarise(r.output_tok_s for r in many)["median"]
        rows.append([name, *map(milliseconds, medians), f"{rate:.0f}"])
        base_one, base_many = results["latency"]["torch"], results["offline"]["torch"]
        ratios[name] = {"tpot": ratio(base_one, one, "tpot_s"), "output": ratio(many, base_many, "output_tok_s")}
    low = lows["latency"]
    rows.append(["floor", *map(milliseconds, (low["ttft_s"], low["tpot_s"])), f"{lows['offline']['output_tok_s']:.0f}"])
    columns = ["engine", "latency: TTFT ms", "latency: TPOT ms", "offline: output tok/s"]
    columns_zh = ["引擎", "latency：TTFT ms", "latency：TPOT ms", "offline：输出 tok/s"]
    return {
        "machine": {"bandwidth_gb_s": bandwidth / 1e9, "gemm_gflop_s": flops / 1e9, "dtype": DTYPE},
        "floors": lows,
        "faster_than_torch": ratios,
        "tables": {"speed": table(columns, columns_zh, rows)},
    }


def main() -> int:
    parser = cli.parser("common.gpu_check", "Check kernels and CUDA graphs on this machine's GPU and time the engine.")
    parser.add_argument("--chapter", default=latest_chapter(), help="which engine (default: the latest with kernels)")
    parser.add_argument("--model", default="dummy:qwen3-0.6b", help="local folder, Hub id or preset")
    parser.add_argument("--quick", action="store_true", help="fewer cases and runs")
    parser.add_argument("--json", metavar="FILE", help="write the result with its host record")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("gpu-check needs an NVIDIA GPU and a CUDA build of torch: torch finds none here")
    data: dict[str, Any] = {"gpu": host_record(device="cuda")["gpu"], "model": args.model}
    data["kernels"] = check_kernels(args.chapter, "cuda", cases=4 if args.quick else 24, longest=1500)
    kinds = ["kernel", "dtype", "largest error", "bound"], ["内核", "类型", "最大误差", "界限"]
    cells = [
        [c["kernel"], c["dtype"], "wrong" if c["error"] is None else f"{c['error']:.1e}", f"{c['bound']:.1e}"]
        for c in data["kernels"]
    ]
    tables = {"kernels": table(*kinds, cells)}
    data["graphs"] = check_graphs(args.chapter, args.model)
    checks = data["kernels"] + data["graphs"]["steps"]
    results = measure(args.chapter, args.model, rounds=2 if args.quick else 7)
    speed = speed_tables(args.model, results)
    tables |= speed.pop("tables")
    data |= speed
    data["decode_kernel"] = time_decode(args.chapter, data["machine"]["bandwidth_gb_s"] * 1e9)
    data["runs"] = {w: {name: [r.totals() for r in runs] for name, runs in by.items()} for w, by in results.items()}
    failed = [check for check in checks if not check["ok"]]
    for check in failed:
        print(f"failed: {check}")
    if args.json:
        save_result(args.json, data | {"ok": not failed, "tables": tables})
        print(f"result: {args.json}")
    print(f"{len(checks)} checks, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run_main(main)
