"""``python -m common.cpu.bench``: each C++ operator next to its torch definition, in the shapes of SmolLM2-135M.

The two take turns and the best time of each counts, so that a busy machine slows both alike; with one thread it is processor
time that counts. Times are of one call; attention goes through several layers' caches in turn, as a step does, so that
it reads memory and not the processor's cache.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from common.cpu.definitions import CpuOps
from common.cpu.native import native_ops

HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 9, 3, 64, 576, 1536, 49152, 30
PAGE = 16
ROUNDS = 3  # at least
CACHE_BYTES = 300 * 2**20  # at most, of all layers that take turns


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one shape; ``layers`` holds the arguments of successive calls."""

    name: str
    shape: str
    layers: list[tuple]
    bytes: int  # that one call has to read and write


def paged(requests: list[tuple[int, int]], dtype: torch.dtype) -> tuple[list[tuple], int]:
    """paged_attention's arguments for requests of (extend, length), and the bytes of keys and values."""
    need = [-(-length // PAGE) for _, length in requests]
    size = sum(need) * PAGE * KV_HEADS * DIM * dtype.itemsize * 2
    pages = iter(torch.randperm(sum(need)).tolist())
    table = torch.zeros(len(requests), max(need), dtype=torch.int32)
    for b, n in enumerate(need):
        table[b, :n] = torch.tensor(list(itertools.islice(pages, n)))
    bounds = torch.tensor([0, *(extend for extend, _ in requests)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    q = torch.randn(int(bounds[-1]), HEADS, DIM).to(dtype)
    layers = []
    for _ in range(max(2, min(LAYERS, CACHE_BYTES // size))):
        k, v = (torch.randn(sum(need), PAGE, KV_HEADS, DIM).to(dtype) for _ in range(2))
        layers.append((q, k, v, table, bounds, lengths, DIM**-0.5))
    return layers, size


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, positions in itertools.product((1, 16, 64), (192, 1024)):
        layers, size = paged([(1, positions)] * rows, dtype)
        yield Case("paged_attention", f"{rows} × 1 after {positions - 1}", layers, size)
    for extend, length in ((5, 192), (128, 128), (512, 512), (2048, 2048), (64, 1024)):
        layers, _ = paged([(extend, length)], dtype)
        yield Case("paged_attention", f"{extend} after {length - extend}", layers, 0)


def small_cases(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    qkv = random(rows, HEADS + 2 * KV_HEADS, DIM)
    qk, k, v = qkv[:, : HEADS + KV_HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    cos, sin = random(rows, 1, DIM), random(rows, 1, DIM)
    caches = [random(256, PAGE, KV_HEADS, DIM) for _ in range(2)]
    slots = torch.randperm(256 * PAGE)[:rows]
    arguments = {
        "rms_norm": (random(rows, HIDDEN), random(HIDDEN), 1e-5, random(rows, HIDDEN)),
        "rotary": (qk, cos, sin),
        "store_kv": (k, v, *caches, slots),
        "silu_and_mul": (random(rows, 2 * INTERMEDIATE),),
        "argmax_rows": (random(rows, VOCAB),),
    }
    for name, values in arguments.items():
        yield Case(name, f"{rows} rows", [values], 0)


def best_times(case: Case, implementations: list[CpuOps], seconds: float) -> list[float]:
    """Seconds of one call, by implementation: the best of each layer, averaged over the layers."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    functions: list[Callable] = [getattr(ops, case.name) for ops in implementations]
    best = [[float("inf")] * len(case.layers) for _ in functions]
    repeat = 20 if len(case.layers) == 1 else 1  # so that reading the clock does not count
    until, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < until or rounds < ROUNDS:
        rounds += 1
        for function, times in zip(functions, best, strict=True):
            for i, arguments in enumerate(case.layers):
                start = clock()
                for _ in range(repeat):
                    function(*arguments)
                times[i] = min(times[i], (clock() - start) / repeat)
    return [sum(times) / len(times) for times in best]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m common.cpu.bench", description=__doc__.partition(":")[2])
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape")
    options = parser.parse_args()
    ops = native_ops()
    if ops is None:
        return 1
    torch.set_num_threads(max(1, options.threads))
    dtype = getattr(torch, options.dtype)
    table = Table(title=f"{options.dtype}, {torch.get_num_threads()} threads, best times of one call")
    for column in ("operator", "shape", "C++ µs", "torch µs", "torch/C++", "GB/s"):
        table.add_column(column, justify="left" if column in ("operator", "shape") else "right", no_wrap=True)
    cases = itertools.chain(attention_cases(dtype), *(small_cases(rows, dtype) for rows in (1, 16, 64)))
    with torch.inference_mode():
        for case in cases:
            mine, theirs = best_times(case, [ops, CpuOps()], options.seconds)
            speed = f"{case.bytes / mine / 1e9:.1f}" if case.bytes else ""
            row = (f"{mine * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{theirs / mine:.1f}", speed)
            table.add_row(case.name, case.shape, *row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
