"""What a worker can run: a chapter's LLM, or transformers as its peer, behind one small interface.

Token times come from where each engine hands a token out, so TTFT and gaps are measured and never a share of a total.
"""

import functools
import importlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common import peers
from common.host import native_bfloat16
from common.trace import Tracer, to_json

DEFAULT_MODEL = "smollm2-135m"
POLL_S = 0.01


@dataclass(frozen=True)
class Finished:
    """A request that is complete; `token_times` are seconds since it was added, one per token."""

    rid: int
    token_ids: list[int]
    token_times: list[float]
    cached_tokens: int = 0


class Engine(Protocol):
    """What `drive` needs of an engine. `step` may wait for a short while, never for requests that were not added."""

    name: str
    model: str
    method: str

    def add(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int: ...
    def step(self) -> list[Finished]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class ChapterEngine:
    """A chapter's LLM. Raises RuntimeError when a request fails or does not get exactly the tokens it asked for.

    Of the options ``sampling`` holds SamplingParams fields for all requests; the others are the LLM's.
    """

    method = "token times from the engine, greedy, EOS ignored"

    def __init__(self, name: str, options: dict[str, Any]):
        module = importlib.import_module(name)
        self.name, self.model = name, options.get("model", DEFAULT_MODEL)
        sampling = options.get("sampling") or {}
        self.params = functools.partial(module.SamplingParams, **sampling)
        if sampling:
            self.method = f"token times from the engine, sampled with {sampling}, EOS ignored"
        self.llm = module.LLM(**{key: value for key, value in options.items() if key != "sampling"})
        # An output carries no id: it is known again by its prompt and its length. Requests equal in both differ only in
        # their place in time, so the oldest is taken.
        self._open: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        rid = self.llm.add(list(prompt_ids), self.params(max_tokens=max_tokens, ignore_eos=True))
        self._open.setdefault(prompt_ids, []).append((rid, max_tokens))
        return rid

    def step(self) -> list[Finished]:
        return [self._finished(output) for output in self.llm.step()]

    def _finished(self, output: Any) -> Finished:
        prompt, count = tuple(output.prompt_token_ids), len(output.token_ids)
        what = f"{self.name}: a request with {len(prompt)} prompt tokens"
        if output.finish_reason == "error":
            raise RuntimeError(f"{what} failed: {output.error}")
        twins = self._open.get(prompt, [])
        match = next((twin for twin in twins if twin[1] == count), None)
        if match is None:
            wanted = " or ".join(str(n) for _, n in twins) or "no"
            raise RuntimeError(f"{what} gave {count} tokens ({output.finish_reason}) where {wanted} were due")
        if len(output.token_times) != count:
            raise RuntimeError(f"{what} gave {count} tokens with {len(output.token_times)} times")
        twins.remove(match)
        if not twins:
            del self._open[prompt]
        return Finished(match[0], list(output.token_ids), list(output.token_times), output.cached_tokens)

    def has_work(self) -> bool:
        return self.llm.has_work()

    def stats(self) -> dict[str, int]:
        return dict(self.llm.stats())

    def reserved(self) -> int:
        """Positions of the KV cache that running requests hold, filled or not; 0 in a chapter without a cache."""
        engine = self.llm.engine
        if not hasattr(engine, "kv"):
            return 0
        return len({page for req in engine.scheduler.running for page in req.pages}) * engine.kv.page_size

    def logits(self, ids: Sequence[int], start: int) -> Any:
        """float32[len(ids) - start, V]: what the engine says about the tokens from `start` on, each after those before it.

        The engine generates them step by step as it always does, but its sampler is told what to draw.
        """
        import torch

        sampler, rows = self.llm.engine.sampler, []
        sample = sampler.sample

        def forced(logits: Any, drawn: Any) -> tuple[list[int], list[None]]:
            rows.append(logits.detach().float().clone())
            return [ids[row.position] for row in drawn], [None] * len(drawn)

        sampler.sample = forced
        try:
            params = self.params(max_tokens=len(ids) - start, ignore_eos=True)
            output = self.llm.generate([list(ids[:start])], params, progress=False)[0]
        finally:
            sampler.sample = sample
        if output.token_ids != list(ids[start:]):
            raise RuntimeError(f"{self.name} did not take the tokens it was told: {output.error or 'others came out'}")
        return torch.cat(rows)

    def close(self) -> None:
        self.llm.close()


def open_engine(name: str, options: dict[str, Any]) -> Engine:
    """The chapter package `name`, or a peer: `hf` (transformers), `vllm`, `openvino`. Raises what the engine raises on
    options it refuses."""
    if name == "hf":
        return open_hf(**options)
    if name in peers.OPENERS:
        return peers.OPENERS[name](**options)
    return ChapterEngine(name, options)


def follow(name: str, options: dict[str, Any], prompt: str, max_tokens: int) -> dict[str, Any]:
    """One prompt through a chapter with a tracer: {"output", "text_of" (one per token), "stats", "events"}."""
    module = importlib.import_module(name)
    tracer = Tracer()
    params = module.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with module.LLM(tracer=tracer, **options) as llm:
        output = llm.generate([prompt], params, progress=False)[0]
        if output.error:
            raise ValueError(output.error)
        texts = [llm.tokenizer.decode([token]) for token in output.token_ids]
        return {
            "output": output.to_dict(),
            "text_of": texts,
            "stats": dict(llm.stats()),
            "events": to_json(tracer.events),
        }


def open_hf(
    model: str = DEFAULT_MODEL,
    dtype: str = "auto",
    threads: int | None = None,
    batch: int = 1,
    continuous: bool = False,
) -> Engine:
    """transformers' own generation: `batch` requests at a time, left-padded, or its continuous batching.

    Prefix sharing, which continuous batching has, is on. Raises ValueError for a bad option and CheckpointError for a
    model that cannot be found.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype must be auto, float32 or bfloat16, not {dtype!r}")
    if batch < 1 or (continuous and batch != 1):
        raise ValueError(f"batch must be at least 1, and 1 with continuous batching, not {batch}")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from common.checkpoints import resolve
    from common.dummy import is_dummy

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16() else "float32"
    checkpoint = resolve(model)
    if is_dummy(checkpoint.folder):
        network = _from_source(checkpoint, getattr(torch, dtype))
    else:
        network = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=getattr(torch, dtype))
    network.eval()
    # Without an EOS id a request ends at its length alone, and no logits processor changes the tokens on the way there.
    network.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    for option in ("temperature", "top_k", "top_p"):
        setattr(network.generation_config, option, None)
    return ContinuousHF(network, model) if continuous else StaticHF(network, model, batch)


def _from_source(checkpoint: Any, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint.folder), dtype=dtype)
    with checkpoint.open() as source:
        state = {name: source.slice(name)[...] for name in source.names()}
    unexpected = network.load_state_dict(state, strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"transformers has no place for {', '.join(unexpected)}")
    network.tie_weights()
    return network


def _hf_logits(network: Any, ids: Sequence[int], start: int) -> Any:
    import torch

    with torch.inference_mode():
        return network(torch.tensor([list(ids)])).logits[0, start - 1 : -1].float()


class _Clock:
    """A streamer that keeps only when each step's tokens came; transformers asks for `put` and `end`."""

    def __init__(self) -> None:
        self.times: list[float] = []  # perf_counter seconds; the first entry is the prompt, not a token

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class StaticHF:
    """generate() over up to `batch` queued requests; all wait for the longest, whose surplus tokens are dropped."""

    def __init__(self, network: Any, model: str, batch: int):
        self.name, self.model, self.batch = "hf", model, batch
        self.method = f"transformers generate, static batches of {batch}, token times from a streamer, EOS off"
        self._network = network
        self._queue: deque[tuple[int, tuple[int, ...], int, float]] = deque()
        self._next = 0

    def add(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        self._next += 1
        self._queue.append((self._next, prompt_ids, max_tokens, time.perf_counter()))
        return self._next

    def step(self) -> list[Finished]:
        import torch

        taken = [self._queue.popleft() for _ in range(min(self.batch, len(self._queue)))]
        width, steps = max(len(ids) for _, ids, _, _ in taken), max(n for _, _, n, _ in taken)
        pads = [width - len(ids) for _, ids, _, _ in taken]
        prompts = torch.tensor([[0] * pad + list(ids) for pad, (_, ids, _, _) in zip(pads, taken, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        clock = _Clock()
        output = self._network.generate(prompts, attention_mask=mask, max_new_tokens=steps, streamer=clock)
        tokens, times = output[:, width:].tolist(), clock.times[1:]
        if len(times) != steps or len(tokens[0]) != steps:
            raise RuntimeError(f"transformers gave {len(tokens[0])} tokens at {len(times)} times, not {steps}")
        return [
            Finished(rid, row[:n], [t - added for t in times[:n]])
            for (rid, _, n, added), row in zip(taken, tokens, strict=True)
        ]

    def logits(self, ids: Sequence[int], start: int) -> Any:
        return _hf_logits(self._network, ids, start)

    def has_work(self) -> bool:
        return bool(self._queue)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._queue.clear()


class ContinuousHF:
    """The manager behind model.generate_batch, which itself knows only one length for all requests."""

    def __init__(self, network: Any, model: str):
        if not hasattr(network, "init_continuous_batching"):
            raise ValueError("this version of transformers has no continuous batching")
        self.name, self.model = "hf", model
        self.method = "transformers continuous batching, its own token times, EOS off"
        self._manager = network.init_continuous_batching()
        self._manager.start()
        self._added: dict[str, tuple[int, int, float]] = {}
        self._next = 0

    def add(self, prompt_ids: tuple[int, ...], max_tokens: int) -> int:
        self._next += 1
        key = f"request-{self._next}"
        self._added[key] = (self._next, max_tokens, time.perf_counter())
        self._manager.add_request(list(prompt_ids), key, max_new_tokens=max_tokens, record_timestamps=True)
        return self._next

    def step(self) -> list[Finished]:
        output = self._manager.get_result(timeout=POLL_S)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("transformers' generation thread ended")
            return []
        if not output.is_finished():
            return []
        rid, wanted, added = self._added.pop(output.request_id)
        tokens, times = list(output.generated_tokens), list(output.timestamps or ())
        if output.error or len(tokens) != wanted or len(times) != wanted:
            reason = output.error or f"{len(tokens)} tokens at {len(times)} times, not {wanted}"
            raise RuntimeError(f"transformers failed: {reason}")
        return [Finished(rid, tokens, [t - added for t in times])]

    def has_work(self) -> bool:
        return bool(self._added)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)
        self._manager.destroy()
