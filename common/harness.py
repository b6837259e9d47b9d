"""The measuring side of a benchmark: engines in fresh processes, interleaved rounds, summaries and result files.

with Worker("ch03_generation", model="smollm2-135m") as a, Worker("ch04_kvcache", model="smollm2-135m") as b:
    runs = interleave({"before": a, "after": b}, workloads.get("latency"), rounds=5)
print(ratio(runs["after"], runs["before"], "tpot_s"))
"""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.host import host_record
from common.workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
STDERR_LINES = 20


@dataclass(frozen=True)
class RequestResult:
    """What one request of a run got. Seconds count from the moment at which the request was due.

    `tpot_s` is the time per output token after the first and None with one token; `itl_s` are the gaps between tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    itl_s: list[float]
    token_ids: list[int]


@dataclass(frozen=True)
class RunResult:
    """One run of a workload by one engine.

    `total_s` runs from the first submission to the end of the step that gave the last token: time before the first
    arrival is not in it. Token counts are lengths of token_ids. `ttft_s`, `tpot_s` and `e2e_s` are medians over the
    requests, `counters` the growth of the engine's counters during the run (levels: the value at the end), `peaks` the
    highest levels seen after a step where they were asked for, `peak_rss_bytes` the worker's since its start.
    `kv_utilisation`, which comes with the peaks: of the positions that running requests held, summed over the steps, the
    share that had a token in it; None without a cache.
    """

    workload: str
    engine: str
    method: str
    total_s: float
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    requests_s: float
    ttft_s: float
    ttft_p99_s: float
    tpot_s: float | None
    e2e_s: float
    itl_p50_s: float | None
    itl_p99_s: float | None
    counters: dict[str, int]
    peaks: dict[str, int]
    peak_rss_bytes: int
    requests: list[RequestResult]
    kv_utilisation: float | None = None

    @classmethod
    def of(cls, requests: list[RequestResult], total_s: float, **known: Any) -> "RunResult":
        """The run of these requests in `total_s` seconds; `known` are the fields that cannot be derived."""
        tpots = [r.tpot_s for r in requests if r.tpot_s is not None]
        gaps = [gap for r in requests for gap in r.itl_s]
        ttfts = [r.ttft_s for r in requests]
        output_tokens = sum(len(r.token_ids) for r in requests)
        return cls(
            total_s=total_s,
            prompt_tokens=sum(r.prompt_tokens for r in requests),
            output_tokens=output_tokens,
            output_tok_s=output_tokens / total_s,
            requests_s=len(requests) / total_s,
            ttft_s=percentile(ttfts, 50),
            ttft_p99_s=percentile(ttfts, 99),
            tpot_s=percentile(tpots, 50) if tpots else None,
            e2e_s=percentile([r.e2e_s for r in requests], 50),
            itl_p50_s=percentile(gaps, 50) if gaps else None,
            itl_p99_s=percentile(gaps, 99) if gaps else None,
            requests=requests,
            **known,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunResult":
        """Inverse of `dataclasses.asdict`."""
        return cls(**{**data, "requests": [RequestResult(**r) for r in data["requests"]]})

    def metric(self, key: str) -> float:
        """A number of this run by name: a field, `counters.NAME` or `peaks.NAME`. Raises ValueError without one."""
        value: Any = self
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"a run of {self.workload} by {self.engine} has no number {key!r}")
        return value

    def totals(self) -> dict[str, Any]:
        """Everything but the single requests, for a result file."""
        return {key: value for key, value in asdict(self).items() if key != "requests"}


class WorkerError(RuntimeError):
    """A worker refused a command, died, or did not answer in time; the message ends with the tail of its stderr."""


class Worker:
    """One engine in a process of its own, started on entry and gone, with all its children, on exit.

    `engine` is a chapter's package name or a peer's (`common.engines.open_engine`), `options` what it is opened with.
    `timeout_s` bounds each single answer, loading the model included. `python` is the interpreter of a peer that lives
    in an environment of its own.
    """

    def __init__(
        self,
        engine: str,
        *,
        timeout_s: float = 1800.0,
        env: dict[str, str] | None = None,
        python: str = "",
        **options: Any,
    ):
        self.engine, self.options, self.timeout_s, self.python = engine, options, timeout_s, python or sys.executable
        self.env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> "Worker":
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [self.python, "-m", "common.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=ROOT,
            env=self.env,
            start_new_session=True,  # a process group of its own, so that ranks and helpers can be ended with it
        )
        try:
            self.ask({"cmd": "open", "engine": self.engine, "options": self.options})
        except BaseException:
            self._end()
            self._stderr.close()
            raise
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None and self._process is not None:
                self.ask({"cmd": "close"}, timeout_s=min(30.0, self.timeout_s))
        finally:
            self._end()
            self._stderr.close()

    def run(self, workload: Workload, *, peaks: bool = False, timeout_s: float | None = None) -> RunResult:
        """Run the workload once and measure it; `peaks` reads the engine's levels after each step."""
        answer = self.ask({"cmd": "run", "workload": workload.to_dict(), "peaks": peaks}, timeout_s=timeout_s)
        return RunResult.from_dict(answer["result"])

    def stats(self) -> dict[str, int]:
        """The engine's counters since it was opened."""
        return self.ask({"cmd": "stats"})["stats"]

    def ask(self, command: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Send one command and wait for its answer. After any WorkerError no process of the worker is left."""
        if self._process is None or self._process.stdin is None:
            raise WorkerError(f"worker for {self.engine} is not running")
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + limit))
        except TimeoutError:
            self._fail(f"gave no answer to {command['cmd']!r} within {limit:g} s")
        except (EOFError, BrokenPipeError):
            self._fail(f"died during {command['cmd']!r}")
        if not answer["ok"]:
            self._fail(answer["error"])
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not select.select([pipe], [], [], min(left, 0.5))[0]:
                # A child may hold the pipe open after the worker itself is gone: then no end of file comes.
                if self._process.poll() is not None:
                    raise EOFError
                continue
            chunk = os.read(pipe, 1 << 20)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _fail(self, what: str) -> None:
        status = self._end()
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").splitlines()[-STDERR_LINES:]
        if status is not None and what.startswith("died"):
            what += f" ({signal.Signals(-status).name})" if status < 0 else f" (exit status {status})"
        raise WorkerError("\n    ".join([f"worker for {self.engine}: {what}", *tail])) from None

    def _end(self) -> int | None:
        """End the whole process group. Returns the exit status of the worker, None if it was still running."""
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        try:
            status: int | None = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return status


def interleave(
    workers: dict[str, Worker], workload: Workload, rounds: int, warmup: int = 1, *, peaks: bool = False
) -> dict[str, list[RunResult]]:
    """Run the workload `rounds` times with each worker, in the order ABBA ABBA…: a drift of the machine hits all alike.

    Each worker runs it `warmup` times first, unmeasured. Entry i of every list is of the same round.
    """
    from tqdm import tqdm  # here: a peer's environment, which runs only the other end, may lack it

    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    runs: dict[str, list[RunResult]] = {name: [] for name in workers}
    with tqdm(total=len(workers) * (warmup + rounds), desc=workload.name, file=sys.stderr, leave=False) as bar:
        for i in range(-warmup, rounds):
            for name in list(workers) if i % 2 == 0 else reversed(workers):
                bar.set_postfix_str(name)
                result = workers[name].run(workload, peaks=peaks)
                if i >= 0:
                    runs[name].append(result)
                bar.update()
    return runs


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile, 0 to 100, with linear interpolation between neighbours. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered or not 0 <= q <= 100:
        raise ValueError("a percentile needs at least one value and 0 <= q <= 100")
    place = q / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(values: Iterable[float]) -> dict[str, float]:
    """Median and spread: {median, min, max, iqr, n}. `iqr` is the distance between the quartiles."""
    values = list(values)
    low, middle, high = (percentile(values, q) for q in (25, 50, 75))
    return {"median": middle, "min": min(values), "max": max(values), "iqr": high - low, "n": len(values)}


def ratio(a_runs: list[RunResult], b_runs: list[RunResult], key: str) -> dict[str, float]:
    """Summary of a/b taken round by round, `key` as in RunResult.metric: below 1, a has less of it than b.

    Both runs of a round saw the machine in the same state, which two separate medians did not.
    """
    pairs = [(a.metric(key), b.metric(key)) for a, b in zip(a_runs, b_runs, strict=True)]
    if any(b == 0 for _, b in pairs):
        raise ValueError(f"no ratio of {key!r}: it is 0 in a run to compare with")
    return summarise(a / b for a, b in pairs)


def parent_of(chapter: str, root: Path = ROOT) -> str | None:
    """Name of the chapter that `chapter` is a copy of, from its chapter.toml; None for the first one."""
    with open(root / chapter / "chapter.toml", "rb") as file:
        return tomllib.load(file).get("parent") or None


def commit_record(root: Path = ROOT) -> dict[str, Any] | None:
    """{hash, dirty} of the working tree, None outside git. Documents and results do not count as dirt."""
    code = [".", ":(exclude)docs", ":(exclude)*.md"]
    try:
        head = _git(root, "rev-parse", "HEAD")
        return {"hash": head, "dirty": bool(_git(root, "status", "--porcelain", "--", *code))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def command_line() -> str:
    """The command of this process as a reader would type it: no path of this machine in it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    what = f"-m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    arguments = []
    for argument in sys.argv[1:]:
        flag, is_joined, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        arguments.append(flag + is_joined + (Path(value).name if os.path.isabs(value) else value))
    return " ".join(["python", what, *arguments])


def save_result(path: str | Path, data: dict[str, Any], *, threads: int | None = None) -> dict[str, Any]:
    """Write `data` as JSON with what is needed to judge it: host (versions included), commit, date and command.

    The file appears complete or not at all. Returns what was written; ValueError if `data` has one of those keys.
    """
    record = {
        "host": host_record(threads),
        "commit": commit_record(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
    }
    if taken := record.keys() & data.keys():
        raise ValueError(f"a result may not set {', '.join(sorted(taken))}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record | data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
    return record | data
