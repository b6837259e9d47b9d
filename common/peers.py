"""Engines of others, measured on the same workloads: each lives in an environment of its own and runs there behind
`common.worker`, so that one and the same loop submits the requests and reads the clock.

Nothing of theirs is imported before it is opened, and nothing here needs more than the standard library until then.
"""

import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, CONTEXT = 64, 2048  # what the chapters take by default: requests in one step, tokens of one request


def _versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


class VLLM:
    """vLLM for CPUs, in process: `add_request` and `step` of its engine, tokens as they come."""

    name = "vllm"
    method = "vLLM engine in process, token times at the end of its steps, greedy, EOS ignored"

    def __init__(self, model: str, dtype: str = "auto", threads: int = 2, prefix_cache: bool = True):
        """model: a folder. Environment variables that are set already win over the ones that are set here."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.model = model
        self._engine = vllm.LLM(
            model=model, dtype=dtype, max_num_seqs=ROWS, max_model_len=CONTEXT, enable_prefix_caching=prefix_cache
        ).llm_engine
        self._params = lambda n: vllm.SamplingParams(
            temperature=0.0, max_tokens=n, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._open: dict[str, tuple[int, float, list[int], list[float]]] = {}
        self._next = 0

    def add(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        self._next += 1
        key = str(self._next)
        self._open[key] = (max_tokens, time.perf_counter(), [], [])
        self._engine.add_request(key, {"prompt_token_ids": list(prompt_ids)}, self._params(max_tokens))
        return self._next

    def step(self) -> list[Any]:
        from common.engines import Finished

        finished = []
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            wanted, added, tokens, times = self._open[output.request_id]
            fresh = list(output.outputs[0].token_ids)
            tokens += fresh
            times += [now - added] * len(fresh)
            if output.finished:
                del self._open[output.request_id]
                if len(tokens) != wanted:
                    raise RuntimeError(f"vLLM gave {len(tokens)} tokens where {wanted} were due")
                finished.append(Finished(int(output.request_id), tokens, times, output.num_cached_tokens or 0))
        return finished

    def has_work(self) -> bool:
        return bool(self._open)

    def stats(self) -> dict[str, int]:
        return {}

    def versions(self) -> dict[str, str]:
        names = {"vllm", "vllm-cpu"} & {d.metadata["Name"] for d in importlib.metadata.distributions()}
        return _versions("torch", *sorted(names))

    def close(self) -> None:
        pass  # its processes end with this one's group


class OpenVINO:
    """OpenVINO GenAI's continuous batching, in process: `add_request` and `step` of its pipeline.

    `model` is a folder in its own format or a GGUF file (common.gguf_export writes one).
    """

    name = "openvino"
    method = "OpenVINO GenAI continuous batching in process, token times at the end of its steps, greedy, EOS ignored"

    def __init__(self, model: str, dtype: str = "auto", threads: int = 2, prefix_cache: bool = True, cache_gb: int = 2):
        """dtype float32 asks for float32 arithmetic; auto and bfloat16 leave the choice to OpenVINO."""
        import numpy
        import openvino
        import openvino_genai

        self.model, self._genai = model, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_seqs = ROWS
        scheduler.enable_prefix_caching = prefix_cache
        options = {"INFERENCE_NUM_THREADS": threads} | (
            {"INFERENCE_PRECISION_HINT": "f32"} if dtype == "float32" else {}
        )
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self._tensor = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        self._open: dict[int, tuple[Any, int, float, list[int], list[float]]] = {}
        self._next = 0

    def add(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        self._next += 1
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        added = time.perf_counter()
        handle = self._pipe.add_request(self._next, self._tensor(prompt_ids), config)
        self._open[self._next] = (handle, max_tokens, added, [], [])
        return self._next

    def step(self) -> list[Any]:
        from common.engines import Finished

        self._pipe.step()
        now, finished = time.perf_counter(), []
        for rid, (handle, wanted, added, tokens, times) in list(self._open.items()):
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
                    times += [now - added] * len(output.generated_ids)
            if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                if len(tokens) != wanted:
                    raise RuntimeError(f"OpenVINO gave {len(tokens)} tokens where {wanted} were due")
                del self._open[rid]
                finished.append(Finished(rid, tokens, times))
        return finished

    def has_work(self) -> bool:
        return bool(self._open)

    def stats(self) -> dict[str, int]:
        return {}

    def versions(self) -> dict[str, str]:
        return _versions("openvino", "openvino-genai")

    def close(self) -> None:
        del self._pipe


OPENERS: dict[str, Callable[..., Any]] = {"vllm": VLLM, "openvino": OpenVINO}
GGUF = ("openvino",)  # peers that are given the model as a GGUF file


def model_for(peer: str, folder: Path) -> str:
    """What to pass as `model` to the peer for a checkpoint folder; a GGUF file is written into the cache once."""
    if peer not in GGUF or not (folder / "model.safetensors").is_file():
        return str(folder)
    from common.gguf_export import exported

    return str(exported(folder))
