"""A decode step against its size: batch 1 to 64, context 128 to 8,000 tokens, next to the floor.

Prompts of that length are only pretended: while they are admitted the model's forward gives zeros at once, so that
scheduler, cache and queues are exactly as after a real prefill, without its hours. Then full decode steps are timed. The
cache is filled with one value first: memory that nobody has written is one page of zeros, which reads too fast.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import plots
from common.checkpoints import resolve
from common.compare_measure import Settings, machine
from common.compare_plan import warmup
from common.engines import ChapterEngine
from common.experiments import milliseconds, table
from common.harness import percentile
from common.host import memory_bytes
from common.profile import Floor
from common.profile_clock import ATTENTION, LINEARS, Clock, Step, attached
from common.workloads import id_range

BATCHES, CONTEXTS, QUICK = (1, 4, 16, 64), (128, 512, 2000, 8000), ((1, 8), (128, 512))
STEPS, SPARE = (
    8,
    160,
)  # measured steps of a cell; positions beyond the context, for the tokens of admission and measuring
MEMORY_SHARE = 0.4  # of the machine's memory, for keys and values


def measure(args: argparse.Namespace, package: str) -> dict[str, Any]:
    """{machine, cells: [{batch, context, step_s, attention_s, linears_s, other_s, floor_s}], skipped: [line, …]}."""
    checkpoint = resolve(args.model)
    batches, contexts = args.batches or BATCHES, args.contexts or CONTEXTS
    if args.quick:
        batches, contexts = args.batches or QUICK[0], args.contexts or QUICK[1]
    if min(*batches, *contexts) < 1 or max(contexts) + SPARE > checkpoint.max_len:
        raise ValueError(
            f"batches and contexts must be positive and contexts at most {checkpoint.max_len - SPARE} here"
        )
    settings = Settings(args.model, args.dtype, args.threads, warmup(checkpoint.vocab_size))
    data: dict[str, Any] = {"chapter": package, "machine": machine(checkpoint.config, settings), "cells": []}
    rates = data["machine"]["bandwidth_gb_s"] * 1e9, data["machine"]["gemm_gflop_s"] * 1e9
    floor = Floor(checkpoint.config, args.dtype, *rates)
    skipped: list[str] = []
    with tqdm(total=len(batches) * len(contexts), desc=f"{package} grid", file=sys.stderr, leave=False) as bar:
        for context in contexts:
            fits = [b for b in batches if _bytes(b, context, floor) <= MEMORY_SHARE * memory_bytes()]
            skipped += [f"batch {b} with context {context}: too much memory" for b in batches if b not in fits]
            if fits:
                data["cells"] += _column(args, package, context, fits, floor, skipped, bar)
            bar.update(len(batches) - len(fits))
    if not data["cells"]:
        raise ValueError(f"nothing could be measured: {'; '.join(skipped)}")
    return data | {"skipped": skipped}


def _bytes(batch: int, context: int, floor: Floor) -> int:
    return batch * (context + 2 * SPARE) * floor.token_bytes


def _column(
    args: argparse.Namespace,
    package: str,
    context: int,
    batches: Sequence[int],
    floor: Floor,
    skipped: list[str],
    bar: Any,
) -> list[dict[str, Any]]:
    """All batches at one context, in one engine."""
    wanted = {
        "max_model_len": context + SPARE, "kv_memory": str(_bytes(max(batches), context, floor)),
        "max_running": max(batches), "max_batch_tokens": 16384, "prefix_cache": False, "cuda_graph": False,
    }  # fmt: skip
    engine = ChapterEngine(
        package,
        {"model": args.model, "dtype": args.dtype, "threads": args.threads}
        | {key: value for key, value in wanted.items() if key in _fields(package)},
    )
    cells = []
    try:
        inner = engine.llm.engine
        if not hasattr(inner, "kv"):
            raise ValueError(f"{package} has no KV cache: its step has no context of its own")
        inner.kv.k.fill_(0.01)
        inner.kv.v.fill_(0.01)
        for batch in batches:
            bar.set_postfix_str(f"batch {batch}, context {context}")
            steps = cell(engine, batch, context)
            if steps:
                cells.append(_summary(steps, batch, context, floor))
            else:
                skipped.append(f"batch {batch} with context {context}: this chapter does not run so many at once")
            bar.update()
    finally:
        engine.close()
    return cells


def _fields(package: str) -> dict[str, Any]:
    return importlib.import_module(f"{package}.config").EngineConfig.__dataclass_fields__


def cell(engine: ChapterEngine, batch: int, context: int) -> list[Step]:
    """The measured decode steps of `batch` requests of `context` tokens; [] if they do not run together."""
    llm = engine.llm
    inner = llm.engine
    runner, scheduler = inner.runner, inner.scheduler
    rng, (lo, hi) = random.Random(f"{batch}:{context}"), id_range(inner.limits.vocab_size)
    params = engine.params(max_tokens=SPARE, ignore_eos=True)
    rids = [llm.add([rng.randrange(lo, hi) for _ in range(context)], params) for _ in range(batch)]

    def pretended(inp: Any) -> torch.Tensor:
        return torch.zeros(len(inp.logit_rows), inner.limits.vocab_size, dtype=inner.dtype, device=inner.device)

    runner.forward = pretended
    try:
        for _ in range(SPARE - 2 * STEPS):
            if not scheduler.waiting and all(req.state.name == "DECODE" for req in scheduler.running):
                break
            llm.step()
    finally:
        del runner.forward
    clock = Clock()
    if len(scheduler.running) == batch and not scheduler.waiting:
        llm.step()  # the first one after a change of shape pays for it
        with attached(llm, engine.name, clock):
            for _ in range(STEPS):
                llm.step()
    for rid in rids:
        llm.abort(rid)
    while llm.has_work():
        llm.step()
    return clock.steps


def _summary(steps: Sequence[Step], batch: int, context: int, floor: Floor) -> dict[str, Any]:
    """Medians over the steps of a cell. `other_s` is all that is neither a linear layer nor attention."""
    parts = [(s.total_s, s.parts.get(ATTENTION, 0.0), s.parts.get(LINEARS, 0.0)) for s in steps]
    total, attention, linears = (percentile(column, 50) for column in zip(*parts, strict=True))
    return {
        "batch": batch,
        "context": context,
        "step_s": total,
        "step_min_s": min(s.total_s for s in steps),
        "attention_s": attention,
        "linears_s": linears,
        "other_s": percentile([t - a - w for t, a, w in parts], 50),
        "floor_s": sum(percentile([floor.of(s)[part] for s in steps], 50) for part in (ATTENTION, LINEARS)),
    }


def report(data: dict[str, Any]) -> dict[str, Any]:
    """Step times, and what is left of them without linear layers and attention: that must not grow with the context."""
    cells = {(cell["batch"], cell["context"]): cell for cell in data["cells"]}
    batches, contexts = (sorted({cell[key] for cell in data["cells"]}) for key in ("batch", "context"))
    columns, columns_zh = (
        ["batch", *(f"context {c:,}" for c in contexts)],
        ["批", *(f"上下文 {c:,}" for c in contexts)],
    )

    def rows(text: Any) -> list[list[str]]:
        return [[str(b), *(text(cells[b, c]) if (b, c) in cells else "–" for c in contexts)] for b in batches]

    return {
        "step": table(
            [f"{columns[0]}: step ms (times the floor)", *columns[1:]],
            [f"{columns_zh[0]}：每步 ms（下限的倍数）", *columns_zh[1:]],
            rows(lambda cell: f"{milliseconds(cell['step_s'])} ({cell['step_s'] / cell['floor_s']:.2f})"),
        ),
        "other": table(
            [f"{columns[0]}: ms without linears and attention", *columns[1:]],
            [f"{columns_zh[0]}：除线性层与注意力外的 ms", *columns_zh[1:]],
            rows(lambda cell: milliseconds(cell["other_s"])),
        ),
    }


def figure(data: dict[str, Any], path: Path) -> None:
    """Step time over context, a panel for each of up to four batch sizes, the floor dashed."""
    batches = sorted({cell["batch"] for cell in data["cells"]})
    batches = batches if len(batches) <= 4 else [batches[round(i * (len(batches) - 1) / 3)] for i in range(4)]
    panels = []
    for batch in batches:
        cells = [cell for cell in data["cells"] if cell["batch"] == batch]
        series = {
            name: [(cell["context"], cell[key] * 1e3) for cell in cells]
            for name, key in (
                ("step", "step_s"),
                ("attention", "attention_s"),
                ("linears", "linears_s"),
                ("rest", "other_s"),
            )
        }
        floor = [(cell["context"], cell["floor_s"] * 1e3) for cell in cells]
        panels.append(plots.Panel(f"batch {batch}", series, floor))
    if len(panels) == 1:
        panels *= 2  # the grid of lines has two to four
    plots.small_multiples(panels, path, xlabel="context (tokens)", ylabel="ms", logx=True, logy=True)
