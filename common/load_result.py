"""What a load run amounts to: from the stamped bytes of each answer to latencies, rates and a table.

Token counts come from `usage`: the number of chunks is never taken for the number of tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from common import api
from common.harness import RequestResult, RunResult, percentile

POINTS = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class LoadRequest:
    """One request and what came back. `due_s`, `sent_s`: seconds of the run's clock; all else counts from `due_s`.

    `chunks` are the events with text. `itl_s` are the gaps between them: gaps between tokens only where each chunk holds
    one. `tpot_s` = (last - first arrival) / (completion_tokens - 1), None where all text came at once. Latencies are None
    unless the answer was complete, with usage and a finish_reason; otherwise `error` says what was wrong, `status` being
    None where no answer began. `sent_s` is None if it was never sent.
    """

    order: int
    max_tokens: int
    due_s: float
    sent_s: float | None
    status: int | None = None
    error: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    chunks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""


@dataclass(frozen=True)
class LoadResult:
    """One run. `total_s`: from the first due request to the end of the last answer, failed ones included."""

    workload: str
    method: str
    total_s: float
    requests: list[LoadRequest]

    @property
    def answered(self) -> list[LoadRequest]:
        """The requests with a complete answer; only these have latencies and count as throughput."""
        return [r for r in self.requests if r.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """How often each error came, the most frequent first."""
        found: dict[str, int] = {}
        for r in self.requests:
            if r.error is not None:
                found[r.error] = found.get(r.error, 0) + 1
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def output_tokens(self) -> int:
        return sum(r.completion_tokens for r in self.answered)

    @property
    def tokens_per_chunk(self) -> float | None:
        """1 where every event carries one token, and then itl_s are gaps between tokens."""
        chunks = sum(r.chunks for r in self.answered)
        return self.output_tokens / chunks if chunks else None

    @property
    def wrong_length(self) -> int:
        """Answers that have another number of tokens than was asked for: the server does not honour ignore_eos."""
        return sum(r.completion_tokens != r.max_tokens for r in self.answered)

    @property
    def late_s(self) -> float:
        """How late the client itself sent a request, at worst. The latencies include it."""
        return max((r.sent_s - r.due_s for r in self.requests if r.sent_s is not None), default=0.0)

    def values(self, name: str) -> list[float]:
        """All `ttft_s`, `tpot_s`, `e2e_s` or `itl_s` of the answered requests."""
        found = [getattr(r, name) for r in self.answered]
        return [gap for gaps in found for gap in gaps] if name == "itl_s" else [v for v in found if v is not None]

    def points(self, name: str) -> dict[str, float] | None:
        """{p50, p90, p99, max} in seconds; None without values."""
        values = self.values(name)
        return {key: percentile(values, q) for key, q in POINTS.items()} if values else None

    def totals(self) -> dict[str, Any]:
        """Everything but the single requests, for a result file."""
        answered = self.answered
        return {
            "workload": self.workload,
            "method": self.method,
            "total_s": self.total_s,
            "requests": len(self.requests),
            "answered": len(answered),
            "errors": self.errors,
            "prompt_tokens": sum(r.prompt_tokens for r in answered),
            "cached_tokens": sum(r.cached_tokens for r in answered),
            "output_tokens": self.output_tokens,
            "output_tok_s": self.output_tokens / self.total_s if self.total_s else 0.0,
            "requests_s": len(answered) / self.total_s if self.total_s else 0.0,
            "tokens_per_chunk": self.tokens_per_chunk,
            "wrong_length": self.wrong_length,
            "late_s": self.late_s,
        } | {name: self.points(name) for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s")}

    def to_dict(self) -> dict[str, Any]:
        """Totals and requests as plain data, without the texts."""
        rows = [{k: v for k, v in asdict(r).items() if k != "text"} for r in self.requests]
        return {"load": self.totals(), "requests": rows}

    def run_result(self, engine: str, counters: dict[str, int] | None = None, peak_rss_bytes: int = 0) -> RunResult:
        """The run in the form of the in-process harness, for its summaries and ratios.

        `token_ids` are empty, for no ids cross HTTP; output_tokens and the rates are set from usage. ValueError if a
        request failed: a run with holes must not be compared with a whole one.
        """
        if len(self.answered) < len(self.requests) or not self.requests:
            raise ValueError(
                f"{len(self.requests) - len(self.answered)} of {len(self.requests)} requests failed: {self.errors}"
            )
        rows = [
            RequestResult(r.prompt_tokens, r.cached_tokens, r.ttft_s, r.tpot_s, r.e2e_s, r.itl_s, [])  # type: ignore[arg-type]
            for r in self.requests
        ]
        known = {"counters": counters or {}, "peaks": {}, "peak_rss_bytes": peak_rss_bytes}
        run = RunResult.of(rows, self.total_s, workload=self.workload, engine=engine, method=self.method, **known)
        return replace(run, output_tokens=self.output_tokens, output_tok_s=self.output_tokens / self.total_s)


@dataclass
class Exchange:
    """A request under way. `received` are the pieces of the body with their arrival times, `ended_s` stays None until
    the answer has ended in whatever way."""

    order: int
    max_tokens: int
    due_s: float
    body: bytes
    sent_s: float | None = None
    ended_s: float | None = None
    status: int | None = None
    error: str | None = None
    received: list[tuple[float, bytes]] = field(default_factory=list)


def outcome(x: Exchange) -> LoadRequest:
    """What an ended exchange amounts to: reads the pieces of its stream."""
    blank = LoadRequest(x.order, x.max_tokens, x.due_s, x.sent_s, x.status, x.error)
    if x.error is None and x.status != 200:
        body = b"".join(part for _, part in x.received)
        return replace(blank, error=api.error_of(x.status or 0, body))
    answer = _Answer()
    try:
        answer.read(x.received)
    except api.ApiError as problem:
        blank = replace(blank, error=blank.error or str(problem))
    if blank.error is None and (lacking := answer.lacking()):
        blank = replace(blank, error=f"the stream ended without {', '.join(lacking)}")
    found = replace(blank, chunks=len(answer.marks), finish_reason=answer.finish, text="".join(answer.texts))
    return found if found.error is not None else answer.timed(found)


@dataclass
class _Answer:
    """What the events of one stream say, and when: `marks` are the arrivals of the events with text."""

    marks: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    finished_s: float = 0.0
    done_s: float | None = None

    def read(self, received: list[tuple[float, bytes]]) -> None:
        """Raises ApiError at an event that is an error or not understood; what came before it is kept."""
        parser = api.Events()
        for at, data in ((at, data) for at, part in received for data in parser.feed(part)):
            if data == api.DONE:
                self.done_s = at
                return
            event = api.decode(data)
            text, finish = api.choice_of(event)
            self.usage = event.get("usage") or self.usage
            if text:
                self.marks.append(at)
                self.texts.append(text)
            if finish:
                self.finish, self.finished_s = finish, at

    def lacking(self) -> list[str]:
        """What a complete answer has and this one has not."""
        usage = {"prompt_tokens", "completion_tokens"} <= self.usage.keys()
        parts = {"finish_reason": self.finish is not None, "usage": usage, api.DONE: self.done_s is not None}
        return [name for name, there in parts.items() if not there]

    def timed(self, r: LoadRequest) -> LoadRequest:
        """Latencies of a complete answer. Tokens without text, such as EOS, came at the latest with the finish_reason."""
        tokens = self.usage["completion_tokens"]
        first, last = (self.marks or [self.finished_s])[0], max([*self.marks[-1:], self.finished_s])
        return replace(
            r,
            ttft_s=first - r.due_s,
            tpot_s=(last - first) / (tokens - 1) if tokens > 1 and len(self.marks) > 1 else None,
            e2e_s=(self.done_s or last) - r.due_s,
            itl_s=[b - a for a, b in pairwise(self.marks)],
            prompt_tokens=self.usage["prompt_tokens"],
            completion_tokens=tokens,
            cached_tokens=(self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )


def print_result(result: LoadResult, description: str = "", console: Console | None = None) -> None:
    """The run as a table, and in words what the table cannot say."""
    console = console or Console(highlight=False)
    total = result.totals()
    table = Table(title=f"{result.workload}: {result.method}", title_justify="left", caption_justify="left")
    table.caption = description or None
    table.add_column("ms")
    for column in POINTS:
        table.add_column(column, justify="right")
    for label, name in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s")):
        points = total[name] or {}
        table.add_row(label, *(f"{1e3 * points[key]:.1f}" if points else "-" for key in POINTS))
    console.print(table)
    lines = [
        f"{total['answered']} of {total['requests']} requests answered in {total['total_s']:.2f} s: "
        f"{total['output_tok_s']:.1f} output tokens/s, {total['requests_s']:.2f} requests/s",
        f"{total['prompt_tokens']} prompt tokens ({total['cached_tokens']} cached), {total['output_tokens']} output tokens; "
        f"sent at most {1e3 * total['late_s']:.1f} ms late",
    ]
    per_chunk = total["tokens_per_chunk"]
    if per_chunk is not None and abs(per_chunk - 1) > 0.005:
        lines.append(f"a chunk carries {per_chunk:.2f} tokens on average: ITL is between chunks, not between tokens")
    if total["wrong_length"]:
        lines.append(
            f"{total['wrong_length']} answers have another length than asked for: not the same work as elsewhere"
        )
    lines += [f"error ({count} of {total['requests']} requests): {text}" for text, count in total["errors"].items()]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
