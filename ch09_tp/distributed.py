"""Several ranks hold one model together: where each stands, who starts them, and the collectives between them.

Rank 0 decides and samples; the others run the forwards that it sends. Every rank makes the same collectives in the same
order because the ForwardInput alone determines them, never a clock, a hash or the state of a queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common import child
from common.cpu import shm
from common.net import family, listens

from .config import EngineConfig
from .core import ForwardInput

MEET_S = 600  # how long a rank waits for the others when the group forms
FOREVER = timedelta(days=365)  # a rank waits for the next step as long as it takes; who dies is noticed otherwise
GRACE_S = 5.0  # that ranks may take to end by themselves
LEAVE_S = 60.0  # that rank 0 may take to end the group once another host was told to
LOST = 3  # exit status of a rank that ends because others have
NOTHING, FORWARD, STOP = range(3)
PARTS = [f.name for f in fields(ForwardInput)]


class RankError(RuntimeError, ConnectionError):
    """A rank has ended or cannot be reached; the message names it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands in its group. Descriptors are those of the process that runs the rank; -1: there is none."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of this host: the number of its GPU
    local_size: int = 1
    count: int = 1  # ranks that the process started by the user answers for, from ``rank`` on; 1 in those it starts
    address: str = "127.0.0.1"  # of the store where the ranks meet
    port: int = 0
    name: str = "minisgl"  # of the group in that store
    own_store: bool = True  # False: torchrun keeps it
    memory: int = -1  # shared by all ranks
    wire: int = -1  # rank 0's socket to the server

    @staticmethod
    def of(config: EngineConfig) -> Place:
        """Of the first rank that this host, or this process of torchrun, runs. ValueError where the options disagree."""
        env = os.environ
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys() and config.nnodes == 1:
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
            if config.tp not in (1, size):
                raise ValueError(f"tp is {config.tp} but torchrun started {size} processes")
            local = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1)), 1
            name = f"minisgl-{env.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            kept = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return Place(rank, size, *local, env["MASTER_ADDR"], int(env["MASTER_PORT"]), name, not kept)
        count = config.tp // config.nnodes
        where = (config.master_addr, config.master_port) if config.nnodes > 1 else ("127.0.0.1", 0)
        return Place(config.node_rank * count, config.tp, 0, count, count, *where)


class Ranks:
    """The rank processes that this process has started, from ``first`` to the last one that it answers for.

    They end when they are told to, when this process ends (its end of their standard input closes), or by close().
    Nothing has a fixed name: the store listens on a free port and the shared memory is an inherited descriptor.
    """

    def __init__(
        self, config: EngineConfig, place: Place, first: int, wire: int = -1, trace: float | None = None
    ) -> None:
        """wire: descriptor for rank 0, which sends its trace, counted from ``trace``. ValueError: the port is taken."""
        self._store: dist.TCPStore | None = None
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        if place.rank == 0 and place.own_store and place.size > 1:
            try:
                server = socket.create_server((place.address, place.port), family=family(place.address))
            except OSError as error:
                where = f"{place.address}:{place.port}"
                raise ValueError(f"cannot listen on {where}: {error.strerror or error}") from None
            place = replace(place, port=server.getsockname()[1])
            self._store = dist.TCPStore(
                place.address, place.port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
        self._memory = shm.create(place.size) if place.count == place.size > 1 and shm.works(place.size) else -1
        self.place = replace(place, count=1, memory=self._memory)
        try:
            for rank in range(first, place.rank + place.count):
                local = place.local_rank + rank - place.rank
                own = replace(self.place, rank=rank, local_rank=local, wire=wire if rank == 0 else -1)
                orders = {"config": asdict(config), "place": asdict(own), "trace": trace}
                keep = [descriptor for descriptor in (own.memory, own.wire) if descriptor >= 0]
                self.processes[rank] = child.start(f"{__package__}.supervisor", orders, keep)
        except BaseException:
            self.close()
            raise

    def culprit(self) -> tuple[int, int] | None:
        """(rank, exit status, negative for a signal) of the one that ended, None while all run. Of several: who was
        killed, else who failed, else who ended because of that."""
        ended = {rank: status for rank, p in self.processes.items() if (status := p.poll()) is not None}
        order = sorted(ended.items(), key=lambda item: (item[1] == 0, item[1] == LOST, item[1] > 0, item[0]))
        return order[0] if order else None

    def check(self, patience_s: float = 0.0) -> None:
        """Raise RankError if one of them has ended; wait up to ``patience_s`` for that."""
        deadline = time.monotonic() + patience_s
        while not (found := self.culprit()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if found:
            rank, status = found
            how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
            raise RankError(f"rank {rank} ended with {how}")

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended; False if some have not after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        return all(process.poll() is not None for process in self.processes.values())

    def close(self, grace_s: float = 0.0) -> None:
        """Give them ``grace_s`` seconds to end by themselves, then kill the rest. Idempotent."""
        self.wait(grace_s)
        for process in self.processes.values():
            child.end(process)
        if self._memory >= 0:
            os.close(self._memory)
        self._memory, self._store = -1, None


class Group:
    """The collectives of one rank. With one rank nothing happens and nothing is sent."""

    def __init__(self, place: Place, device: torch.device, ranks: Ranks | None = None) -> None:
        """ranks: the processes that this one has started, for noticing and for ending them."""
        self.rank, self.size, self.local_size = place.rank, place.size, place.local_size
        self.device, self.ranks = device, ranks
        self.bytes = 0  # that this rank has brought into all-reduces
        self._shared: shm.SharedMemory | None = None
        if self.size == 1:
            return
        try:
            store = self._meet(place)
            self._host: Any = _gloo(dist.PrefixStore("host", store), place)  # small messages, on the CPU
        except (RuntimeError, OSError) as error:  # torch's own, where another host never comes or goes meanwhile
            raise error if isinstance(error, RankError) else RankError(str(error).partition("\n")[0]) from None
        self._data: Any = self._host
        if device.type == "cuda":
            torch.cuda.set_device(place.local_rank)
            # Ranks that wait for work wait on the CPU, so that a collective that takes long has lost somebody.
            patience = timedelta(seconds=LEAVE_S)
            self._data = dist.ProcessGroupNCCL(dist.PrefixStore("data", store), self.rank, self.size, patience)  # type: ignore[arg-type]
        elif place.memory >= 0:
            self._shared = shm.SharedMemory(place.memory, self.rank, self.size, self.check)

    def check(self) -> None:
        """Raise RankError if a rank that this process has started has ended."""
        if self.ranks:
            self.ranks.check()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks, in place; every rank gets the same bits."""
        if self.size > 1 and x.numel():
            self.bytes += x.numel() * x.element_size()
            if self._shared and x.dtype in shm.DTYPES:
                self._shared.all_reduce(x)
            else:
                self._do(self._data.allreduce, [x])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[R, n] of every rank -> [R, size * n] on rank 0, in the order of the ranks; the others get their own x back."""
        if self.size == 1 or not x.numel():
            return x.new_empty(len(x), x.shape[1] * self.size) if self.size > 1 else x
        x = x.contiguous()
        if self._shared:
            return self._shared.gather(x)
        outs = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._do(self._data.gather, [outs] if outs else [], [x], dist.GatherOptions())  # whose root is 0
        return torch.cat(outs, dim=-1) if outs else x

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        if self.size > 1:
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MIN
            tensor = torch.tensor([value])
            self._do(self._host.allreduce, [tensor], options)
            value = int(tensor)
        return value

    def send(self, inp: ForwardInput | None = None, stop: bool = False) -> None:
        """Rank 0: have the others run this forward, or stop; neither only finds out whether they are there. Two
        messages: what comes and its sizes, then all values."""
        if self.size == 1:
            return
        self.check()
        parts = [getattr(inp, name) for name in PARTS] if inp is not None else []
        header = [STOP if stop else FORWARD if parts else NOTHING]
        for part in parts:
            header += [part.dtype is torch.int32, part.shape[0], part.shape[1] if part.dim() == 2 else -1]
        header += [0] * (1 + 3 * len(PARTS) - len(header))
        self._broadcast(self._host, torch.tensor(header), timedelta(seconds=GRACE_S if stop else 0))
        if parts:
            self._broadcast(self._data, torch.cat([part.flatten().long() for part in parts]))

    def receive(self) -> ForwardInput | None:
        """The others: what rank 0 sent; None for the end."""
        header = torch.zeros(1 + 3 * len(PARTS), dtype=torch.int64)
        while header[0] == NOTHING:
            self._broadcast(self._host, header)
        kind, *shapes = header.tolist()
        if kind == STOP:
            return None
        described = [(short, (n,) if m < 0 else (n, m)) for short, n, m in zip(*(shapes[i::3] for i in range(3)))]
        sizes = [torch.Size(shape).numel() for _, shape in described]
        payload = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        self._broadcast(self._data, payload)
        values = zip(payload.split(sizes), described, strict=True)
        return ForwardInput(*(p.view(shape).to(torch.int32 if short else torch.int64) for p, (short, shape) in values))

    def close(self, grace_s: float = GRACE_S) -> None:
        """Rank 0: have the others stop, and end those that this process has started within ``grace_s``. Idempotent."""
        try:
            if self.rank == 0 and grace_s:
                self.send(stop=True)
        except RankError:
            grace_s = 0.0
        if self.ranks:
            self.ranks.close(grace_s)
        self.size, self.ranks, self._shared, self._host, self._data = 1, None, None, None, None

    def _meet(self, place: Place) -> dist.Store:
        """The group's part of the store, once every rank is there: what follows would wait for one that has died."""
        deadline = time.monotonic() + MEET_S

        def wait(rank: int, has_come: Callable[[], bool]) -> None:
            while not has_come():
                self.check()
                if time.monotonic() > deadline:
                    raise RankError(f"rank {rank} did not come to {place.address}:{place.port} within {MEET_S} s")
                time.sleep(0.02)

        wait(0, lambda: listens(place.address, place.port))  # torch's own waiting prints its stack every few seconds
        tcp = dist.TCPStore(
            place.address, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEET_S)
        )
        store = dist.PrefixStore(place.name, tcp)
        store.set(f"rank{self.rank}", "")
        for rank in range(self.size):
            wait(rank, lambda key=f"rank{rank}": store.check([key]))  # type: ignore[misc]
        return store

    def _broadcast(self, group: Any, tensor: torch.Tensor, patience: timedelta = timedelta()) -> None:
        if self._shared:
            self._shared.broadcast(tensor)
        else:
            self._do(group.broadcast, [tensor], dist.BroadcastOptions(), patience=patience)  # whose root is 0

    def _do(self, collective: Callable[..., Any], *args: Any, patience: timedelta = timedelta()) -> None:
        try:
            collective(*args).wait(patience)  # 0: without limit
        except RuntimeError as error:
            if self.ranks:
                self.ranks.check(patience_s=2.0)  # it knows who it was
            reason = str(error).partition(". ")[0].rpartition("] ")[2]  # without the place in gloo's source
            raise RankError(f"rank {self.rank} has lost the others: {reason}") from None


ALONE = Group(Place(), torch.device("cpu"))  # of everything that is not shared


def join(config: EngineConfig, place: Place, device: torch.device) -> Group:
    """Become one of the ranks. In a process that the user started that is rank 0, which starts those of its host; on a
    host without rank 0 this call serves the group until it ends, and ends the process then."""
    if device.type == "cuda" and place.local_size > torch.cuda.device_count():
        raise ValueError(f"tp needs {place.local_size} GPUs on this host, it has {torch.cuda.device_count()}")
    if config.place or place.size == 1:
        return Group(place, device)
    if place.rank > 0:
        from .supervisor import attend  # here, because it needs this module

        sys.exit(attend(config))
    ranks = Ranks(config, place, first=1)
    try:
        return Group(ranks.place, device, ranks)
    except BaseException:
        ranks.close()
        raise


def _gloo(store: dist.Store, place: Place) -> dist.ProcessGroupGloo:
    """A gloo group of its own: the default group of torch.distributed belongs to the program, not to an engine.

    It listens at the address with which this host reaches the store; a host's name often leads elsewhere.
    """
    with socket.socket(family(place.address), socket.SOCK_DGRAM) as probe:
        probe.connect((place.address, place.port))
        address = probe.getsockname()[0]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=MEET_S)
    group = dist.ProcessGroupGloo(store, place.rank, place.size, options)
    group.set_timeout(FOREVER)
    return group
