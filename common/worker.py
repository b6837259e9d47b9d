"""One engine in a fresh process, driven by JSON lines: `python -m common.worker`; common.harness is the other end.

    {"cmd": "open", "engine": "ch04_kvcache", "options": {"model": "smollm2-135m", "dtype": "float32"}}
    {"cmd": "run", "workload": "offline", "scale": 0.25}      or "workload": {…Workload.to_dict()…}
    {"cmd": "stats"}
    {"cmd": "versions"}
    {"cmd": "logits", "sequences": [[[5, 6, 7, 8], 2]], "file": "logits.npy"}      see common.logits
    {"cmd": "follow", "engine": "ch04_kvcache", "options": {}, "prompt": "…", "max_tokens": 8}      without open
    {"cmd": "close"}

Each command gets one line, {"ok": true, …} or {"ok": false, "error": "…"}. Only these lines reach the real standard
output: descriptor 1 points to standard error before an engine is imported, so nothing a library prints corrupts them.
"""

import heapq
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from common.engines import Engine, Finished, follow, open_engine
from common.harness import RequestResult, RunResult
from common.host import versions
from common.workloads import Conversation, Workload, encode_texts, get

LEVELS = ("kv_total", "kv_used", "kv_cached", "running", "waiting")


@dataclass(order=True)
class Job:
    """A request that is due at `due_s`, in seconds of the run's clock; `turn` is its place in its conversation."""

    due_s: float
    order: int
    prompt_ids: tuple[int, ...] = field(compare=False)
    max_tokens: int = field(compare=False)
    talk: Conversation | None = field(compare=False, default=None)
    answers: list[tuple[int, ...]] = field(compare=False, default_factory=list)

    def follow_up(self, answer: list[int], now: float) -> "Job | None":
        """The next turn of the same conversation, due at once."""
        answers = [*self.answers, tuple(answer)]
        if self.talk is None or len(answers) == len(self.talk.turns):
            return None
        prompt = self.talk.prompt(len(answers), answers)
        return Job(now, self.order, prompt, self.talk.turns[len(answers)].max_tokens, self.talk, answers)


def jobs_of(workload: Workload) -> list[Job]:
    """The requests of a workload and the first turns of its conversations; the first arrival is at 0."""
    first = 0.0 if workload.conversations else min((r.arrival_s for r in workload.requests), default=0.0)
    jobs = [Job(r.arrival_s - first, i, r.prompt_ids, r.max_tokens) for i, r in enumerate(workload.requests)]
    for talk in workload.conversations:
        jobs.append(Job(0.0, len(jobs), talk.prompt(0, []), talk.turns[0].max_tokens, talk))
    return jobs


def drive(engine: Engine, workload: Workload, *, peaks: bool = False) -> RunResult:
    """Run the workload on an idle engine: submit each request when it is due, step while there is work, then sum up.

    A request that falls due during a step is submitted after it, and its times still count from when it was due.
    """
    workload = encode_texts(workload, engine.model)
    queue = jobs_of(workload)
    heapq.heapify(queue)
    waiting: dict[int, tuple[Job, float]] = {}
    results: list[tuple[int, int, RequestResult]] = []
    highest: dict[str, int] = {}
    reserved = getattr(engine, "reserved", None) if peaks else None
    held = filled = 0
    before = engine.stats()
    start, now = time.perf_counter(), 0.0
    while queue or waiting:
        while queue and queue[0].due_s <= now:
            job = heapq.heappop(queue)
            added = time.perf_counter() - start
            waiting[engine.add(job.prompt_ids, job.max_tokens)] = (job, added)
        if not waiting:
            time.sleep(max(0.0, queue[0].due_s - now))
            now = max(queue[0].due_s, time.perf_counter() - start)
            continue
        if not engine.has_work():
            raise RuntimeError(f"{engine.name} has no work left, but {len(waiting)} requests have no output")
        finished = engine.step()
        now = time.perf_counter() - start
        for item in finished:
            job, added = waiting.pop(item.rid)
            results.append((job.order, len(job.answers), _request_result(job, item, added - job.due_s, now)))
            if following := job.follow_up(item.token_ids, now):
                heapq.heappush(queue, following)
        if peaks:
            levels = engine.stats()
            highest = {key: max(levels[key], highest.get(key, 0)) for key in LEVELS if key in levels}
            if reserved and levels.get("kv_used"):
                held, filled = held + reserved(), filled + levels["kv_used"]
    results.sort(key=lambda result: result[:2])
    return RunResult.of(
        [result for _, _, result in results],
        now,
        workload=workload.name,
        engine=engine.name,
        method=engine.method,
        counters=_growth(before, engine.stats()),
        peaks=highest,
        peak_rss_bytes=peak_rss_bytes(),
        kv_utilisation=filled / held if held else None,
    )


def _request_result(job: Job, item: Finished, delay: float, now: float) -> RequestResult:
    times = item.token_times
    return RequestResult(
        prompt_tokens=len(job.prompt_ids),
        cached_tokens=item.cached_tokens,
        ttft_s=delay + times[0],
        tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        e2e_s=now - job.due_s,
        itl_s=[b - a for a, b in pairwise(times)],
        token_ids=item.token_ids,
    )


def _growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: value if key in LEVELS else value - before.get(key, 0) for key, value in after.items()}


def peak_rss_bytes() -> int:
    """Highest resident memory of this process.

    VmHWM where there is one: ru_maxrss of a process also remembers the size of the process that started it.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def handle(command: dict[str, Any], engine: Engine | None) -> tuple[dict[str, Any], Engine | None]:
    """The answer to one command, and the engine that is open afterwards. Raises on anything that went wrong."""
    kind = command["cmd"]
    if kind == "open":
        if engine is not None:
            raise ValueError("an engine is open already")
        return {}, open_engine(command["engine"], command.get("options", {}))
    if kind == "follow":
        wanted = command["prompt"], command["max_tokens"]
        return {"seen": follow(command["engine"], command.get("options", {}), *wanted)}, engine
    if engine is None:
        raise ValueError(f"{kind!r} needs an open engine")
    if kind == "run":
        work = command["workload"]
        if isinstance(work, str):
            known = ("vocab_size", "scale", "seed", "length_scale")
            workload = get(work, **{key: command[key] for key in known if key in command})
        else:
            workload = Workload.from_dict(work)
        return {"result": asdict(drive(engine, workload, peaks=command.get("peaks", False)))}, engine
    if kind == "stats":
        return {"stats": engine.stats()}, engine
    if kind == "versions":
        return {"versions": getattr(engine, "versions", versions)()}, engine
    if kind == "logits":
        from common.logits import write

        return {"rows": write(engine, command["sequences"], command["file"])}, engine
    if kind == "close":
        engine.close()
        return {}, None
    raise ValueError(f"unknown command {kind!r}")


def _commands(descriptor: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(descriptor, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def main() -> None:
    """Answer commands until `close` or the end of the input."""
    commands = _commands(os.dup(0))
    # An unreadable descriptor 0 for the engine's children, or they could eat commands.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        engine: Engine | None = None
        for command in commands:
            try:
                answer, engine = handle(command, engine)
                answer["ok"] = True
            except Exception as error:
                traceback.print_exc()
                text = str(error).strip()
                answer = {"ok": False, "error": f"{type(error).__name__}: {text}" if text else type(error).__name__}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if command.get("cmd") == "close":
                break
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    main()
