"""The machine under a measurement: what it is, how fast it reads and multiplies, and what no engine on it can beat."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from common.workloads import Workload

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
PACKAGES = ("torch", "transformers", "triton", "numpy")
CGROUP = Path("/sys/fs/cgroup")  # what a container is allowed
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def host_record(threads: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to judge a number: hardware and versions, and nothing that names a machine, a path or a user.

    `threads` is what the engines were given (default: the cores this process may use). `device="cuda"` adds the GPU.
    """
    info = _cpuinfo()
    record = {
        "cpu": info.get("model name") or info.get("CPU part") or platform.processor() or platform.machine(),
        "arch": platform.machine(),
        "cores": cores(),
        "threads": threads or cores(),
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "os": f"{platform.system()} {'.'.join(re.findall(r'[0-9]+', platform.release())[:2])}",
        "versions": versions(),
    }
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_properties(0)
        size = round(gpu.total_memory / 2**30, 1)
        count, cuda = torch.cuda.device_count(), torch.version.cuda
        record["gpu"] = {"name": gpu.name, "memory_gib": size, "count": count, "cuda": cuda}
    return record


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a number depends on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_flags() -> set[str]:
    """Instruction set extensions as the kernel names them; empty where it does not tell."""
    info = _cpuinfo()
    return set((info.get("flags") or info.get("Features") or "").split())


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, as the engines see it."""
    if importlib.util.find_spec("torch") is None:  # the doctor looks before anything is installed
        return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})
    from common.cpu import has_native_bf16

    return has_native_bf16()


def _cpuinfo() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cores() -> int:
    """That this process may use, and no more than a container's share of processor time is worth."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for read in (_cpu_quota, _old_cpu_quota):
        with contextlib.suppress(ValueError, OSError):  # "max" is no number
            quota, period = read()
            if quota > 0 < period:
                found = min(found, -(-quota // period))
    return found


def _cpu_quota() -> tuple[int, int]:
    quota, period = (CGROUP / "cpu.max").read_text().split()
    return int(quota), int(period)


def _old_cpu_quota() -> tuple[int, int]:
    files = (CGROUP / "cpu" / "cpu.cfs_quota_us", CGROUP / "cpu" / "cpu.cfs_period_us")
    quota, period = (int(file.read_text()) for file in files)
    return quota, period


def memory_bytes() -> int:
    """Of the machine, or of the container if that has less; 0 where neither tells."""
    found = []
    with contextlib.suppress(ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        with contextlib.suppress(ValueError, OSError):  # "max" is no number
            found.append(int(path.read_text()))
    return min(found, default=0)


def measure_bandwidth(threads: int, device: str = "cpu", size_bytes: int = 512 * 2**20, repeats: int = 6) -> float:
    """Read bandwidth in bytes/s: the best of several sums over a tensor far larger than any cache.

    int64 because its sum is one add per eight bytes: the sums of shorter types are bound by arithmetic and read slower.
    """
    import torch

    data = torch.ones(size_bytes // 8, dtype=torch.int64, device=device)
    return data.nbytes / _best(lambda: data.sum(), threads, device, repeats)


def measure_gemm(
    dtype: str, threads: int | None = None, device: str = "cpu", size: int = 2048, repeats: int = 4
) -> float:
    """Floating-point operations per second of a square product: the best of several.

    Weights are prepacked where torch can do that: float32 through F.linear reaches half of what the CPU does.
    """
    import torch

    kind = getattr(torch, dtype)
    x, w = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    multiply = [lambda: torch.nn.functional.linear(x, w)]
    if device == "cpu" and (packed := _packed_product(x, w)):
        multiply.append(packed)
    return 2 * size**3 / min(_best(run, threads, device, repeats) for run in multiply)


def _packed_product(x: "torch.Tensor", w: "torch.Tensor") -> Callable[[], "torch.Tensor"] | None:
    """x @ w.T with weights in oneDNN's own layout; None where these private operators are missing or refuse."""
    import torch

    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0])

        def run() -> "torch.Tensor":
            return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

        run()
    except (AttributeError, RuntimeError):
        return None
    return run


def _best(run: Callable[[], Any], threads: int | None, device: str, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls after one that is not counted."""
    import torch

    before, times = torch.get_num_threads(), []
    torch.set_num_threads(threads or before)
    try:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return min(times[1:])


def parameter_counts(config: dict[str, Any]) -> dict[str, int]:
    """Parameters by use, from a config.json of a Llama, Qwen2, Qwen3 or Mistral model.

    {"linear": in the products of all layers, "head": in the output projection, "small": biases and norms, "embedding":
    in an embedding table of its own, 0 where the head's matrix is that table}. Raises KeyError on another kind.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    inner, kind = config["intermediate_size"], config.get("model_type")
    norms = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)
    biases = queries + 2 * keys if kind == "qwen2" or config.get("attention_bias") else 0
    biases += hidden if config.get("attention_bias") else 0
    biases += 2 * inner + hidden if config.get("mlp_bias") else 0
    table = config["vocab_size"] * hidden
    return {
        "linear": layers * (hidden * (2 * queries + 2 * keys) + 3 * hidden * inner),
        "head": table,
        "small": layers * (norms + biases) + hidden,
        "embedding": 0 if config.get("tie_word_embeddings") else table,
    }


def weight_bytes(config: dict[str, Any], dtype: str) -> int:
    """Bytes of weights that one decode step must read.

    All but an embedding table of its own, of which a step reads a few rows; a tied table is read once, as the head.
    """
    counts = parameter_counts(config)
    return (counts["linear"] + counts["head"] + counts["small"]) * BYTES[dtype]


def kept_dtype(config: dict[str, Any], dtype: str) -> str:
    """What the weights are kept as on a CPU: float32 as bfloat16 where the operator for it is there and the checkpoint was
    stored so, since that loses nothing (``common.cpu.linear.narrowed``)."""
    import torch

    from common.cpu.linear import panel_of

    stored = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if dtype == "float32" and stored == "bfloat16" and panel_of(torch.float32) else dtype


def floors(
    config: dict[str, Any], dtype: str, bandwidth: float, flops: float, workload: "Workload"
) -> dict[str, float]:
    """Times that no engine on this machine can beat without speculation, attention and the cache's bytes left out.

    `bandwidth` in bytes/s, `flops` in operations/s of `dtype`. Seconds: `tpot_s` for a request alone, `ttft_s` for the
    prompt of median length alone, `total_s` for the workload, `total_shared_s` if every prefix is computed once; and
    the `output_tok_s` of `total_s`.
    """
    counts = parameter_counts(config)
    step = weight_bytes(config, kept_dtype(config, dtype)) / bandwidth
    outputs = workload.output_tokens
    arrivals = [r.arrival_s for r in workload.requests]

    def seconds(prompt_tokens: float, output_tokens: float, requests: float) -> float:
        # The last token of an answer is never fed back; the head runs once per output token, not per prompt token.
        fed = prompt_tokens + output_tokens - requests
        return 2 * (counts["linear"] * fed + counts["head"] * output_tokens) / flops

    chains = [r.max_tokens for r in workload.requests]
    chains += [sum(turn.max_tokens for turn in talk.turns) for talk in workload.conversations]
    spread = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    least = max(max(chains) * step, spread)
    total = max(least, seconds(workload.prompt_tokens, outputs, workload.size))
    return {
        "tpot_s": step,
        "ttft_s": max(step, seconds(median(workload.prompt_lengths()), 1, 1)),
        "total_s": total,
        "total_shared_s": max(least, seconds(workload.distinct_prompt_tokens, outputs, workload.size)),
        "output_tok_s": outputs / total,
    }
