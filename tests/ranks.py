"""Ranks without processes: a thread for each, with a group that adds up what they bring. And what the tests of real ones
share."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from common.checkpoints import resolve
from common.service import group as process_group
from tests.conftest import CHAPTERS, ROOT, briefly
from tests.copies import copies

TP_CHAPTERS = [name for name in CHAPTERS if (ROOT / name / "distributed.py").exists()]
QUICK_TP = briefly(TP_CHAPTERS, TP_CHAPTERS[-1])
# For tests of how processes live and die.
PROCESS_CHAPTERS = briefly(TP_CHAPTERS, *copies("distributed.py", "supervisor.py", "serve.py", "frontend.py"))


@dataclass
class Meeting:
    """Where the threads of one group meet."""

    size: int
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)

    def groups(self) -> list[ThreadGroup]:
        return [ThreadGroup(rank, self.size, self) for rank in range(self.size)]

    def run(self, work: Callable[[ThreadGroup], Any]) -> list[Any]:
        """work(group) for every rank at once; what each returned."""

        def guarded(group: ThreadGroup) -> Any:
            try:
                return work(group)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            jobs = [pool.submit(guarded, group) for group in self.groups()]
        errors = [error for job in jobs if (error := job.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [job.result() for job in jobs]


@dataclass
class ThreadGroup:
    """Stands in for a chapter's Group."""

    rank: int
    size: int
    meeting: Meeting
    bytes: int = 0

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.parts[self.rank] = x.clone()
        self.meeting.barrier.wait()
        parts = list(self.meeting.parts)
        self.meeting.barrier.wait()
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += x.numel() * x.element_size()
        first, *others = self.exchange(x)
        return x.copy_(sum(others, first))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.exchange(x), -1) if self.rank == 0 else self.exchange(x)[self.rank]


def modules(chapter: ModuleType) -> Callable[[str], ModuleType]:
    return lambda name: importlib.import_module(f"{chapter.__name__}.{name}")


def logits(chapter: ModuleType, folder: Path, ids: list[int], size: int) -> torch.Tensor:
    """float32[len(ids), V]: the logits of all positions, computed by so many ranks in threads; the first half of the
    tokens in one forward, the rest one by one, so that the shared cache is read too."""
    part = modules(chapter)
    checkpoint = resolve(str(folder))
    config = part("model").ModelConfig.from_dict(checkpoint.config)
    cpu = torch.device("cpu")

    @torch.inference_mode()
    def rank(group: ThreadGroup) -> torch.Tensor:
        chosen = part("ops").choose(cpu, torch.float32, native=False)
        model = part("model").Decoder(config, 512, chosen, cpu, torch.float32, group)
        part("weights").load(model, checkpoint)
        like = torch.empty(0)
        kv = part("kvcache").KVCache(config.layers, 8, 64, model.kv_heads, config.head_dim, like)
        backend = part("attention").TorchBackend(kv)
        out, half = [], len(ids) // 2
        for start, end in [(0, half), *((i, i + 1) for i in range(half, len(ids)))]:
            inp = part("core").ForwardInput(
                ids=torch.tensor(ids[start:end]),
                positions=torch.arange(start, end),
                cu_extend=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                logit_rows=torch.arange(end - start),
                table=torch.arange(8, dtype=torch.int32)[None],
                slots=torch.arange(start, end),
            )
            before = group.bytes
            out.append(model.forward(part("core").Context(inp, backend, backend.plan(inp))))
            if size > 1:  # what the engine counts is what is summed
                assert group.bytes - before == model.allreduce_bytes(end - start)
        assert kv.k.shape[3] == model.kv_heads == max(1, config.kv_heads // size)
        return torch.cat(out)

    return Meeting(size).run(rank)[0]


def children() -> list[int]:
    """Processes that this one has started and that are alive, zombies not counted."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == _me() and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _me() -> int:
    import os

    return os.getpid()


def gone(pids: list[int], timeout_s: float = 10.0) -> float:
    """Seconds until none of these processes is alive; fails if that takes too long."""
    started = time.monotonic()
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < started + timeout_s, f"still alive after {timeout_s:g} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - started


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ranks_of(pid: int) -> list[int]:
    """The rank processes of a server that leads its process group, in the order of the ranks."""
    return sorted(other for other in process_group(pid) if other != pid)
