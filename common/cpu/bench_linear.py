"""``python -m common.cpu.bench_linear``: all linear layers of one step of SmolLM2-135M, computed several ways in turn.

Ours (linear.cpp), with float32 also over weights that are kept as bfloat16, oneDNN with a packed weight, and ``F.linear``,
which is the definition. A step goes through the weights
of all layers, so that it reads memory and not the processor's cache. Medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from common import cli
from common.cpu.bench import DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, VOCAB
from common.cpu.linear import Linear, narrowed, onednn_linear, panel_linear, panel_of, torch_linear
from common.experiments import milliseconds, table
from common.harness import save_result, summarise
from common.host import native_bfloat16

SHAPES = [  # (out, in) of one layer
    ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    (HIDDEN, HEADS * DIM),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
]
ROWS = (1, 8, 64)
NAMES = ("F.linear", "oneDNN, packed", "ours", "ours, kept as bfloat16")


def step(linears: list[Linear], inputs: dict[int, torch.Tensor], sizes: list[int]) -> float:
    """Seconds of one pass through all layers and the head."""
    start = time.perf_counter()
    for linear, inner in zip(linears, sizes, strict=True):
        linear(inputs[inner])
    return time.perf_counter() - start


def measure(dtype: torch.dtype, rounds: int) -> dict[int, dict[str, list[float]]]:
    """rows -> way -> seconds per step of each round. ValueError where our operator is not to be had."""
    panel = panel_of(dtype)
    if panel is None:
        raise ValueError(f"the compiled linear operator is not available here for {dtype}")
    shapes = SHAPES * LAYERS + [(VOCAB, HIDDEN)]
    sizes = [inner for _, inner in shapes]
    weights = [torch.randn(shape).bfloat16().to(dtype) for shape in shapes]
    ways = {
        "F.linear": [torch_linear(w) for w in weights],
        "oneDNN, packed": [onednn_linear(w, None) for w in weights],
        "ours": [panel_linear(w, None, *panel) for w in weights],
    }
    if dtype is torch.float32:
        ways[NAMES[-1]] = [panel_linear(narrowed(w), None, *panel) for w in weights]
    found: dict[int, dict[str, list[float]]] = {}
    for rows in ROWS:
        inputs = {inner: torch.randn(rows, inner).to(dtype) for inner in set(sizes)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name in list(ways) if turn % 2 else list(ways)[::-1]:
                seconds = step(ways[name], inputs, sizes)
                if turn:  # the first warms up
                    times[name].append(seconds)
        found[rows] = times
    return found


def main() -> int:
    parser = cli.parser(
        "common.cpu.bench_linear", "All linear layers of a step of SmolLM2-135M, computed several ways."
    )
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each way (default: 15)")
    parser.add_argument("--json", metavar="FILE", help="write the result with its host record")
    args = parser.parse_args()
    if args.threads < 1 or args.rounds < 1:
        raise ValueError("threads and rounds must be at least 1")
    torch.set_num_threads(args.threads)
    rows, data = [], {}
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32) if native_bfloat16() else (torch.float32,):
            name = str(dtype).removeprefix("torch.")
            for count, times in measure(dtype, args.rounds).items():
                data[f"{name}_{count}"] = {way: summarise(values) for way, values in times.items()}
                cells = [milliseconds(statistics.median(times[way])) if way in times else "–" for way in NAMES]
                rows.append([f"{name}, {count}", *cells])
    columns, columns_zh = (
        ["rows", *(f"{n}, ms" for n in NAMES)],
        ["行数", "F.linear, ms", "oneDNN（已打包）, ms", "我们的, ms", "我们的（以 bfloat16 保存）, ms"],
    )
    shown = table(columns, columns_zh, rows)
    if args.json:
        save_result(args.json, {"steps": data, "tables": {"linears": shown}}, threads=args.threads)
        print(f"result: {args.json}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
