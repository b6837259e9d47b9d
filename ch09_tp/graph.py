"""CUDA graphs for decode. A small step has hundreds of kernels that take longer to launch than to run; a graph is one launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .core import ForwardInput


def graph_sizes(max_running: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, every multiple of 8, max_running; a batch runs in the next larger one."""
    return sorted({size for size in (1, 2, 4, *range(8, max_running, 8)) if size < max_running} | {max_running})


def capture(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Record the kernels that step launches, with their memory from pool, and return what launches them again."""
    # First for real, aside: kernels are compiled and cuBLAS chooses its own, neither of which a capture allows.
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads ask of the device does not end the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay


@dataclass(slots=True)
class Captured:
    """One batch size: how to run it, and where its logits are after that."""

    replay: Callable[[], None] | None = None
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """A graph per decode batch size, all over one set of input buffers and one memory pool.

    Graphs run one at a time, so that they may share memory: the logits of a run are gone after the next. Rows that pad
    a batch up to its graph's size have length 0 and slot -1: attention gives them zeros, and no key or value is stored.
    """

    def __init__(
        self,
        forward: Callable[[ForwardInput], torch.Tensor],
        max_running: int,
        table_width: int,
        device: torch.device,
    ) -> None:
        """forward(inp) -> logits[R, vocab] plans and runs the model, without reading a tensor on the host.

        table_width: pages of the longest request. A size is captured at its first use.
        """
        self.forward = forward
        self.sizes = graph_sizes(max_running)
        self.memory_bytes = 0  # that the graphs' own memory pool took from the device
        self.capture_s = 0.0
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs: dict[int, Captured] = {}

        def buffer(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._buffers = ForwardInput(
            ids=buffer(max_running, dtype=torch.int64),
            positions=buffer(max_running, dtype=torch.int64),
            cu_extend=torch.arange(max_running + 1, dtype=torch.int32, device=device),
            seq_lens=buffer(max_running, dtype=torch.int32),
            logit_rows=torch.arange(max_running, device=device),
            table=buffer(max_running, table_width, dtype=torch.int32),
            slots=buffer(max_running, dtype=torch.int64) - 1,
        )

    @torch.inference_mode()
    def run(self, inp: ForwardInput) -> torch.Tensor | None:
        """Logits[R, vocab], valid until the next run; None if inp is not decode only, or too large for any graph."""
        count = len(inp.seq_lens)
        # With at least one token per request, equal counts leave exactly one, whose logits are wanted.
        if not len(inp.ids) == len(inp.logit_rows) == count or not 0 < count <= self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= count)
        self._fill(inp, count, size)
        # After filling: what a capture computes on the way is this very step, which may be computed more than once.
        graph = self._graphs.get(size) or self._capture(size)
        assert graph.replay and graph.logits is not None
        graph.replay()
        return graph.logits[:count]

    def summary(self) -> str:
        memory = f"{self.memory_bytes / 2**20:.0f} MiB"
        return f"CUDA graphs for batches of {sorted(self._graphs)}: {memory}, captured in {self.capture_s:.1f} s"

    def _fill(self, inp: ForwardInput, count: int, size: int) -> None:
        buffers = self._buffers
        for name in ("ids", "positions", "seq_lens", "slots"):
            getattr(buffers, name)[:count].copy_(getattr(inp, name), non_blocking=True)
        # Beyond what a row's length needs, nobody reads its table.
        buffers.table[:count, : inp.table.shape[1]].copy_(inp.table, non_blocking=True)
        if count < size:
            buffers.seq_lens[count:size].zero_()
            buffers.slots[count:size].fill_(-1)

    @torch.inference_mode()
    def _capture(self, size: int) -> Captured:
        started = time.perf_counter()
        torch.cuda.empty_cache()  # as the capture will: what it gives back must not be counted against the graph
        reserved = torch.cuda.memory_reserved()
        rows = {f.name: getattr(self._buffers, f.name)[:size] for f in fields(ForwardInput)}
        inp = ForwardInput(**rows | {"cu_extend": self._buffers.cu_extend[: size + 1]})
        graph = Captured()

        def step() -> None:
            graph.logits = self.forward(inp)

        graph.replay = capture(step, self._pool)
        self._graphs[size] = graph
        self.memory_bytes += torch.cuda.memory_reserved() - reserved
        self.capture_s += time.perf_counter() - started
        return graph
