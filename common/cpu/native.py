"""C++ operators for the CPU: compiled once on the reader's machine, probed for right results, then used.

The library has no Python in it: it is one shared object with operators of torch's dispatcher. The compiler is called
directly instead of through torch.utils.cpp_extension.load, which wants ninja and setuptools at every start and links an
OpenMP runtime of its own; here the parallel loops bind to the runtime that torch has loaded, and so run in its threads.

Where anything fails, no compiler, no place to write, a wrong result, there is one line on stderr and plain torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from common.cache import CheckpointError, build_once, cache_dir, note
from common.cpu.definitions import CpuOps
from common.cpu.probe import first_wrong

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "linear.cpp", "small_ops.cpp")
HEADERS = ("attend.h", "paged.h", "tensors.h", "vec.h")
LIBRARY = "ops.so"
VERSION = 1
# No -ffast-math: infinities and NaN are meant. Aliasing is off because vectors are read through element pointers.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-w")
MAX_HEAD_DIM = 512
PASSING = ("Killed", "No space left", "out of memory")  # in a compiler's complaint


class NativeError(RuntimeError):
    """The operators cannot be had; the message is one line."""


class PassingError(NativeError):
    """For a reason of the moment: a signal, or no memory or disk to compile with."""


@functools.cache
def native_ops() -> CpuOps | None:
    """The compiled operators, or None with one line on stderr. The first call on a machine compiles them."""
    try:
        load()
        ops = CpuOps(**{field.name: getattr(torch.ops.minisgl_cpu, field.name).default for field in fields(CpuOps)})
        wrong = first_wrong(ops)
        if wrong:
            raise NativeError(f"{wrong} computes wrong results here")
    except NativeError as error:
        note(f"no C++ operators, plain torch instead (slower): {error}")
        return None
    return ops


def fits_native_attention(head_dim: int) -> bool:
    """Whether paged_attention takes heads of this size."""
    return head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM


def load() -> None:
    """Register the operators with torch, compiling them first if need be. NativeError says why not."""
    try:
        folder = build_once(library_folder(), compile_into, VERSION)
    except CheckpointError as error:
        raise NativeError(str(error)) from error
    try:
        torch.ops.load_library(str(folder / LIBRARY))
    except (OSError, RuntimeError) as error:
        raise NativeError(f"cannot load {folder / LIBRARY}: {first_line(str(error.__cause__ or error))}") from error


def library_folder() -> Path:
    """Where the library for these sources, this torch and this processor belongs."""
    parts = [(HERE / name).read_bytes() for name in SOURCES + HEADERS]
    parts += [text.encode() for text in (torch.__version__, sys.platform, processor(), *compiler_flags())]
    return cache_dir() / "native" / f"ops-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:16]}"


def processor() -> str:
    """What -march=native depends on: the instruction sets, which may differ between machines that share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return platform.machine() + (found[0] if found else platform.processor() + mac_model())


def mac_model() -> str:
    """Which of Apple's processors this is: all of them are "arm"."""
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(asked, capture_output=True, text=True).stdout if sys.platform == "darwin" else ""


def compiler_flags() -> tuple[str, ...]:
    """$MINISGL_CXXFLAGS comes last and so wins, for instance "-march=x86-64-v3"."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    openmp = () if sys.platform == "darwin" else ("-fopenmp",)
    return (*FLAGS, native, *openmp, *shlex.split(os.environ.get("MINISGL_CXXFLAGS", "")))


def compiler() -> list[str]:
    """The command of $CXX, else of the first compiler found."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    # clang's parallel loops want its own OpenMP runtime, which torch does not bring; on a Mac there are none.
    names = [wanted] if wanted else [["g++"], ["c++"], *([["clang++"]] if sys.platform == "darwin" else [])]
    for name, *arguments in names:
        path = shutil.which(name)
        if path:
            return [path, *arguments]
    raise NativeError(
        f"no C++ compiler: {wanted[0]} not found" if wanted else "no C++ compiler: install g++ or set CXX"
    )


def compile_into(target: Path) -> None:
    """Compile and link the sources into the folder `target`. NativeError with the compiler's first complaint.

    A compiler that failed is not asked again at every start, until it changes.
    """
    command = compiler()
    identity = identity_of(command)
    if remembered := remembered_failure(identity):
        raise NativeError(remembered)
    note("compiling the CPU operators, once for this machine: about 20 s")
    include = Path(torch.__file__).parent / "include"
    flags = (*compiler_flags(), f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{include}")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as scratch:
            objects = [str(Path(scratch, name).with_suffix(".o")) for name in SOURCES]
            compiles = [
                [*command, *flags, "-c", str(HERE / source), "-o", target]
                for source, target in zip(SOURCES, objects, strict=True)
            ]
            run_all(compiles)
            run_all([[*command, "-shared", *objects, *link_flags(), "-o", str(target / LIBRARY)]])
    except PassingError:
        raise
    except NativeError as error:
        failure_file().write_text(f"{identity}\n{error}\n", encoding="utf-8")
        raise


def identity_of(command: list[str]) -> str:
    status = Path(command[0]).stat()
    return f"{shlex.join(command)} {status.st_size} {status.st_mtime_ns}"


def failure_file() -> Path:
    return library_folder().with_suffix(".failed")


def remembered_failure(identity: str) -> str:
    """What this very compiler complained about before, and how to have it asked again; "" if it did not."""
    try:
        lines = failure_file().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return f"{lines[1]} (delete {failure_file()} to try again)" if len(lines) > 1 and lines[0] == identity else ""


def link_flags() -> list[str]:
    """Against torch, not against an OpenMP runtime: the one that torch links is found through torch."""
    library = Path(torch.__file__).parent / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [*undefined, f"-L{library}", "-ltorch_cpu", "-lc10"]


def run_all(commands: list[list[str]]) -> None:
    """Run commands side by side; NativeError for the first that fails."""
    quiet: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": os.environ | {"LC_ALL": "C"}}
    running = [subprocess.Popen(c, text=True, encoding="utf-8", errors="replace", **quiet) for c in commands]
    try:
        for process in running:
            complaint = process.communicate()[1]
            if process.returncode:
                errors = [line for line in complaint.splitlines() if "error" in line]
                said = first_line("\n".join(errors) or complaint) or f"compiler status {process.returncode}"
                passing = process.returncode < 0 or any(word in said for word in PASSING)
                raise PassingError(said) if passing else NativeError(said)
    finally:
        for process in running:
            process.kill()
            process.wait()


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
