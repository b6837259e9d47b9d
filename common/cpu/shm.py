"""Collectives between the processes of one machine through memory that they share: microseconds, where sockets need
hundreds of them.

Waiting is spinning, so each process wants a core of its own; only in a broadcast does who waits long fall asleep. Where
nothing can be compiled, or for a dtype that the library does not know, there are only sockets: ask `works` first.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from common.cache import CheckpointError, build_once, cache_dir
from common.cpu import native
from common.host import cores

SOURCE = Path(__file__).with_name("shm.cpp")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
PATIENCE_MS = 200
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
)
LIBRARY, VERSION = "shm.so", 1


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled operators, built once per machine; None where that is impossible."""

    def build(target: Path) -> None:
        command = [*native.compiler(), *FLAGS, "-shared", str(SOURCE), "-o", str(target / LIBRARY)]
        subprocess.run(command, check=True, capture_output=True)

    key = zlib.crc32(bytes(1).join([SOURCE.read_bytes(), native.processor().encode(), *map(str.encode, FLAGS)]))
    try:
        folder = build_once(cache_dir() / "native" / f"shm-{key:08x}", build, VERSION)
        found = ctypes.CDLL(str(folder / LIBRARY))
    except (OSError, CheckpointError, native.NativeError, subprocess.CalledProcessError):
        return None
    long, pointer, turn = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64
    found.minisgl_shm_slot.restype = found.minisgl_shm_bytes.restype = long
    found.minisgl_shm_all_reduce.argtypes = [
        pointer, ctypes.c_int, ctypes.c_int, turn, pointer, long, ctypes.c_int, long, long,
    ]  # fmt: skip
    found.minisgl_shm_gather.argtypes = [
        pointer, ctypes.c_int, ctypes.c_int, turn, pointer, pointer, long, long, long, long,
    ]  # fmt: skip
    found.minisgl_shm_broadcast.argtypes = [
        pointer, ctypes.c_int, ctypes.c_int, turn, pointer, long, long, long,
    ]  # fmt: skip
    for function in (found.minisgl_shm_all_reduce, found.minisgl_shm_gather, found.minisgl_shm_broadcast):
        function.restype = long
    return found


def works(ranks: int = 1) -> bool:
    """Whether this machine can do it for so many ranks: spinning takes a core for each. $MINISGL_SHARED_MEMORY=off says
    no."""
    return os.environ.get("MINISGL_SHARED_MEMORY") != "off" and ranks <= cores() and library() is not None


def create(size: int) -> int:
    """Descriptor of fresh memory for ``size`` ranks, without a name anywhere: it is gone with the last process that has
    it. The caller hands it to the ranks and closes it."""
    lib = library()
    assert lib is not None, "ask works() first"
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minisgl")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, lib.minisgl_shm_bytes(size))
    return descriptor


class SharedMemory:
    """One rank's view. Every rank makes the same calls with the same sizes, in the same order."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None]) -> None:
        """check: called five times a second while waiting for another rank; what it raises ends the wait."""
        lib = library()
        assert lib is not None, "ask works() first"
        self.rank, self.size, self.check = rank, size, check
        self._lib, self._slot, self._turn = lib, lib.minisgl_shm_slot(), 1
        self._map = mmap.mmap(descriptor, lib.minisgl_shm_bytes(size))
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x (contiguous, float32 or bfloat16) by its sum over all ranks, added in float32; the same bits in each."""
        kind = DTYPES[x.dtype]
        self._run(self._lib.minisgl_shm_all_reduce, x, [x.data_ptr(), x.numel(), kind], x.numel())

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x[R, n] (contiguous, equal shapes) side by side on rank 0, [R, size * n]; the others get x back."""
        rows, columns = x.shape
        out = x.new_empty(rows, self.size * columns) if self.rank == 0 else x
        to = out.data_ptr() if self.rank == 0 else None
        width = columns * x.element_size()
        self._run(self._lib.minisgl_shm_gather, x, [x.data_ptr(), to, rows, width], rows * width)
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace x (contiguous, equal shapes) by rank 0's. Here a rank may wait as long as it takes."""
        count = x.numel() * x.element_size()
        self._run(self._lib.minisgl_shm_broadcast, x, [x.data_ptr(), count], count)

    def _run(self, operator: Callable[..., int], x: torch.Tensor, what: list[int | None], count: int) -> None:
        """Call the operator until all of x is done, with a look around whenever that takes long."""
        assert x.is_contiguous()
        done = 0
        while (done := operator(self._base, self.rank, self.size, self._turn, *what, done, PATIENCE_MS)) < count:
            self.check()
        self._turn += -(-x.numel() * x.element_size() // self._slot)
