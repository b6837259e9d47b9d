"""The measuring of `common.compare`: one session after another, each in processes of its own, every run kept at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from common import api, logits
from common.compare_plan import Entry, Session
from common.compare_state import State
from common.harness import Worker, WorkerError
from common.host import floors, kept_dtype, measure_bandwidth, measure_gemm, weight_bytes
from common.load import load
from common.load_result import LoadResult
from common.service import Server, ServerError
from common.workloads import Workload

FAULTS = (WorkerError, ServerError, RuntimeError, httpx.HTTPError, api.ApiError)


@dataclass
class Settings:
    """What all engines of a comparison share."""

    model: str
    dtype: str
    threads: int
    warmup: Workload
    sequences: logits.Sequences = field(default_factory=list)  # empty: logits are not compared


def measure(state: State, plan: Sequence[Session], settings: Settings, config: dict[str, Any]) -> None:
    """Run what is not in the state yet. An engine that fails is noted in state.failed and not tried again."""
    left = [(s, [w for w in s.workloads if state.key(w.name, s.entry.name, s.round) not in state.runs]) for s in plan]
    todo = sum(len(works) for _, works in left)
    done = sum(len(s.workloads) for s in plan) - todo
    if done:
        print(f"going on: {done} of {done + todo} runs are there already", file=sys.stderr)
    if not state.machine:
        state.machine = machine(config, settings)
        state.save()
    with tqdm(total=done + todo, initial=done, desc="compare", unit="run", file=sys.stderr) as bar:
        reference = _Reference(settings, bar)
        for session, works in left:
            entry = session.entry
            if works and entry.name not in state.failed:
                try:
                    _run(state, session, works, settings, reference, bar)
                except FAULTS as error:
                    state.failed[entry.name] = str(error)
                    bar.write(f"{entry.name} failed and is left out:\n    {error}", file=sys.stderr)
            bar.update(sum(state.key(w.name, entry.name, session.round) not in state.runs for w in works))


def machine(config: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Read bandwidth and product rate of this machine, measured here, and the weights they are set against."""
    return {
        "bandwidth_gb_s": measure_bandwidth(settings.threads) / 1e9,
        "gemm_gflop_s": measure_gemm(settings.dtype, settings.threads) / 1e9,
        "weight_mb": weight_bytes(config, kept_dtype(config, settings.dtype)) / 1e6,
        "dtype": settings.dtype,
    }


def floors_of(state: State, config: dict[str, Any], workload: Workload) -> dict[str, float]:
    """Times that no engine on this machine can beat without speculation (common.host.floors)."""
    found = state.machine
    rates = found["bandwidth_gb_s"] * 1e9, found["gemm_gflop_s"] * 1e9
    return floors(config, found["dtype"], *rates, workload)


class _Reference:
    """transformers' float32 logits, computed in a process of its own when the first engine is compared with them."""

    def __init__(self, settings: Settings, bar: Any) -> None:
        self.settings, self.bar = settings, bar
        self._found: Any = None  # see common.logits

    def error(self, worker: Worker) -> dict[str, float]:
        if self._found is None:
            self.bar.set_postfix_str("transformers' logits")
            options: dict[str, Any] = {
                "model": self.settings.model,
                "dtype": "float32",
                "threads": self.settings.threads,
            }
            with Worker("hf", **options) as peer:
                self._found = logits.read(peer, self.settings.sequences)
        return logits.error(logits.read(worker, self.settings.sequences), self._found)


def _run(
    state: State, session: Session, works: Sequence[Workload], settings: Settings, reference: _Reference, bar: Any
) -> None:
    entry = session.entry
    bar.set_postfix_str(f"{entry.name}: starting")

    def keep(workload: Workload, totals: dict[str, Any]) -> None:
        state.runs[state.key(workload.name, entry.name, session.round)] = totals
        state.save()
        bar.update()

    if entry.kind != "engine":
        with _serving(entry) as (url, model):
            load(url, settings.warmup, model=model)
            state.versions.setdefault(entry.name, server_version(url))
            for workload in works:
                bar.set_postfix_str(f"{entry.name}: {workload.name}")
                keep(workload, http_totals(load(url, workload, model=model), entry.name))
        return
    with Worker(entry.package, python=entry.python, **entry.options) as worker:
        state.versions.setdefault(entry.name, worker.ask({"cmd": "versions"})["versions"])
        worker.run(settings.warmup)
        for workload in works:
            bar.set_postfix_str(f"{entry.name}: {workload.name}")
            keep(workload, worker.run(workload, peaks=entry.is_chapter).totals())
        if settings.sequences and entry.name not in state.logits and not entry.python:
            with contextlib.suppress(WorkerError):  # an engine that cannot be told its tokens is measured all the same
                state.logits[entry.name] = reference.error(worker)
                state.save()


@contextlib.contextmanager
def _serving(entry: Entry) -> Iterator[tuple[str, str | None]]:
    """Address of the entry's server, started here where there is a command for it, and the name of its model."""
    if entry.kind == "server":
        flags = [part for key, value in entry.options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        with Server(entry.package, *flags) as server:
            yield server.url, None
    elif entry.command:
        with Server.of(entry.command, entry.url) as server:
            yield entry.url, _first_model(server.url)
    else:
        yield entry.url, _first_model(entry.url)


def _first_model(url: str) -> str | None:
    with httpx.Client(timeout=10.0, trust_env=not api.is_loopback(url)) as client:
        return api.first_model(client, url)


def server_version(url: str) -> dict[str, str]:
    """What a server says of its version under /version (vLLM) or /props (llama.cpp); {} where it says nothing."""
    with httpx.Client(base_url=url, timeout=10.0, trust_env=not api.is_loopback(url)) as client:
        for path, key in (("/version", "version"), ("/props", "build_info")):
            with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
                found = client.get(path).json().get(key)
                if found:
                    return {"server": str(found)}
    return {}


def http_totals(result: LoadResult, name: str) -> dict[str, Any]:
    """A load run in the words of RunResult.totals. RuntimeError if a request failed or had another length."""
    if result.errors or result.wrong_length:
        wrong = result.errors or f"{result.wrong_length} answers have another length than was asked for"
        raise RuntimeError(f"{name}: a run with holes is no measurement: {wrong}")
    totals = result.totals()
    points = {key: totals[key] or {} for key in ("ttft_s", "itl_s", "tpot_s", "e2e_s")}
    single = (result.tokens_per_chunk or 0) < 1.01  # else the gaps between events are not gaps between tokens
    return {
        "workload": result.workload,
        "engine": name,
        "method": result.method,
        "counters": {"prefix_hit_tokens": totals["cached_tokens"]},
        "ttft_s": points["ttft_s"].get("p50"),
        "ttft_p99_s": points["ttft_s"].get("p99"),
        "tpot_s": points["tpot_s"].get("p50"),
        "e2e_s": points["e2e_s"].get("p50"),
        "itl_p50_s": points["itl_s"].get("p50") if single else None,
        "itl_p99_s": points["itl_s"].get("p99") if single else None,
    } | {key: totals[key] for key in ("total_s", "prompt_tokens", "output_tokens", "output_tok_s", "requests_s")}


def peer(name: str, settings: Settings, folder: Path, python: str = "") -> Entry:
    """The row of a peer in process: `hf` here, the others under their own interpreter. Raises ValueError."""
    from common import peers

    common_options = {"dtype": settings.dtype, "threads": settings.threads}
    if name == "hf":
        options = {"model": settings.model, "batch": 16, **common_options}
        return Entry("hf", "hf", options=options, note="transformers, static batches of 16", python=python)
    if not python:
        raise ValueError(f"--peer {name} needs --peer-python, the interpreter of the environment it is installed in")
    return Entry(name, name, options={"model": peers.model_for(name, folder), **common_options}, python=python)
