"""Experiment: several tokens per forward where the text can be guessed, against the parent, and what it costs elsewhere."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from common import cli, plots
from common.engines import ChapterEngine
from common.experiments import Experiment, milliseconds, start, table
from common.harness import RunResult, Worker, interleave, parent_of, ratio, summarise
from common.worker import drive
from common.workloads import Request, Workload, get

BATCHES = (1, 4, 16, 32)
LENGTHS = (1, 2, 4, 8)
KINDS = {"edit": "改写", "code": "代码", "chat": "聊天", "random": "随机文本"}
SAMPLED = {"temperature": 1.0}  # greedy answers to random ids run in circles, which is no random text
CODE = (
    "Write a Python class for a bank account with deposit, withdraw and a list of transactions.",
    "Write a C program that reads ten numbers and prints them sorted.",
    "Write unit tests for a function that adds two numbers, with ten cases.",
    "Write an HTML table with the names and ages of six people.",
)
CHAT = (
    "Why is the sky blue?",
    "Give me advice for a first visit to Rome.",
    "Explain to a child how a bicycle stays upright.",
    "What should I think about before I adopt a dog?",
)


def main() -> int:
    bench = start(f"{__package__}.bench", "Speculative decoding against one token per forward.")
    parent = parent_of(str(__package__))
    assert parent is not None
    bench.data["tables"] = {}
    _against_parent(bench, parent)
    _under_load(bench, parent)
    with _engine(bench) as engine:
        _batches(bench, engine)
        _lengths(bench, engine)
    _draft_model(bench)
    return bench.finish()


def texts(kind: str, count: int, max_tokens: int = 96) -> Workload:
    """``count`` requests of a kind, all at once."""
    if kind == "edit":
        return get("edit", scale=count / 8)
    if kind == "random":
        pool = get("offline", seed=10, scale=max(1.0, count / 64)).requests
        requests = tuple(Request((r.prompt_ids * 4)[:64], max_tokens) for r in pool[:count])
    else:
        prompts = CODE if kind == "code" else CHAT
        requests = tuple(Request((), max_tokens, text=prompts[i % len(prompts)] + " " * (i // 4)) for i in range(count))
    return Workload(kind, requests, f"{count} requests, {kind}")


# ---- against the parent, each engine in a process of its own --------------------------------------------------------


def _against_parent(bench: Experiment, parent: str) -> None:
    """One request at a time: what a user who waits for an answer sees. The processes are started in either order: which
    one starts first can decide where its memory lies."""
    rounds = 1 if bench.quick else 4
    own = str(__package__)
    engines: dict[str, tuple[str, dict[str, Any]]] = {
        "ch09": (parent, {}),
        "off": (own, {}),
        "ngram": (own, {"speculative": "ngram"}),
    }
    rows = []
    for kind, sampling in (("edit", {}), ("random", SAMPLED)):
        workload = texts(kind, 2 if bench.quick else 8, 48 if bench.quick else 128)
        common = {**bench.options, "max_running": 1, "sampling": sampling}
        runs: dict[str, list[RunResult]] = {name: [] for name in engines}
        for order in list(engines), list(engines)[::-1]:
            with ExitStack() as stack:
                workers = {}
                for name in order:
                    package, more = engines[name]
                    workers[name] = stack.enter_context(Worker(package, **more, **common))
                for name, some in interleave(workers, workload, rounds).items():
                    runs[name] += some
        times = {name: summarise(run.metric("tpot_s") for run in some) for name, some in runs.items()}
        ratios = {name: ratio(runs[name], runs["ch09"], "tpot_s") for name in ("off", "ngram")}
        bench.data[f"{kind}_batch1"] = {"tpot_s": times, "ratio": ratios, **guesses(runs["ngram"][-1])}
        rows.append([kind, *(milliseconds(t["median"]) for t in times.values()), *map(spread, ratios.values())])
    bench.data["tables"]["batch1"] = table(
        ["text, batch 1", "ch09 TPOT ms", "off, ms", "ngram, ms", "off, ratio", "ngram, ratio"],
        ["文本，批大小 1", "ch09 TPOT ms", "关闭，ms", "ngram，ms", "关闭，比值", "ngram，比值"],
        rows,
        rows_zh=[[KINDS[row[0]], *row[1:]] for row in rows],
    )


def _under_load(bench: Experiment, parent: str) -> None:
    """Many requests at once: what it costs when it is off, and what it does when it is on."""
    rounds, rows = (1 if bench.quick else 7), []
    with (
        Worker(parent, **bench.options) as theirs,
        Worker(str(__package__), **bench.options) as off,
        Worker(str(__package__), speculative="ngram", **bench.options) as on,
    ):
        for name in ("offline", "shared_prefix"):
            workload = get(name, scale=0.1 if bench.quick else 1.0)
            runs = interleave({"ch09": theirs, "off": off, "ngram": on}, workload, rounds)
            speed = {kind: summarise(run.output_tok_s for run in some) for kind, some in runs.items()}
            gains = {kind: ratio(runs[kind], runs["ch09"], "output_tok_s") for kind in ("off", "ngram")}
            bench.data[name] = {"output_tok_s": speed, "ratio": gains, **guesses(runs["ngram"][-1])}
            rows.append([name, *(f"{s['median']:.0f}" for s in speed.values()), *map(spread, gains.values())])
    bench.data["tables"]["load"] = table(
        ["workload", "ch09 tok/s", "off", "ngram", "off, ratio", "ngram, ratio"],
        ["负载", "ch09 tok/s", "关闭", "ngram", "关闭，比值", "ngram，比值"],
        rows,
    )


# ---- one engine whose speculation is switched -----------------------------------------------------------------------


class Switched:
    """One engine in this process; guesses can be switched off and limited between runs."""

    def __init__(self, engine: ChapterEngine) -> None:
        self.engine = engine
        self.scheduler = engine.llm.engine.scheduler
        self.speculator = self.scheduler.speculator
        self.params = importlib.import_module(str(__package__)).SamplingParams

    def run(self, workload: Workload, most: int) -> RunResult:
        """most: guesses per request and step, 0 for none. Random text is sampled, all else is greedy."""
        self.speculator.most = most
        self.scheduler.speculator = self.speculator if most else None
        sampling = SAMPLED if workload.name == "random" else {}
        self.engine.params = functools.partial(self.params, **sampling)
        return drive(self.engine, workload)

    def compare(self, workload: Workload, mosts: tuple[int, ...], rounds: int) -> dict[int, list[RunResult]]:
        """Runs with each limit in turn, once more first to warm up."""
        runs: dict[int, list[RunResult]] = {most: [] for most in mosts}
        for i in range(rounds + 1):
            for most in mosts if i % 2 else mosts[::-1]:
                result = self.run(workload, most)
                if i:
                    runs[most].append(result)
        return runs


@contextmanager
def _engine(bench: Experiment, **more: Any) -> Iterator[Switched]:
    engine = ChapterEngine(str(__package__), {**bench.options, "speculative": "ngram", **more})
    try:
        yield Switched(engine)
    finally:
        engine.close()


def _batches(bench: Experiment, engine: Switched) -> None:
    """Where it wins and where it loses: each kind of text at each batch size, against the same engine without."""
    rounds, rows = (1 if bench.quick else 3), []
    lines: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for count in BATCHES[:2] if bench.quick else BATCHES:
            runs = engine.compare(texts(kind, count, 32 if bench.quick else 96), (0, 8), rounds)
            gain = ratio(runs[8], runs[0], "output_tok_s")
            tpot = ratio(runs[8], runs[0], "tpot_s")
            found = guesses(runs[8][-1])
            bench.data.setdefault("batches", {})[f"{kind}, {count}"] = {"speedup": gain, "tpot": tpot, **found}
            lines[kind].append((count, gain["median"]))
            shown = [
                f"{found['acceptance']:.0%}",
                f"{found['accepted_length']:.2f}",
                f"{found['forwards_per_token']:.2f}",
            ]
            rows.append([kind, count, *shown, f"{tpot['median']:.2f}", spread(gain)])
    bench.data["tables"]["batches"] = table(
        ["text", "batch", "accepted", "tokens per step", "forwards per token", "TPOT, ratio", "throughput, ratio"],
        ["文本", "批大小", "接受率", "每步 token", "每 token 的前向", "TPOT 之比", "吞吐之比"],
        rows,
        rows_zh=[[KINDS[str(row[0])], *row[1:]] for row in rows],
    )
    if path := bench.figure("ch10_speedup.png"):
        plots.line_figure(
            lines,
            path,
            title="Throughput with n-gram guesses, as a multiple of that without",
            xlabel="requests at once",
            ylabel="×",
            floor=1.0,
            logx=True,
        )


def _lengths(bench: Experiment, engine: Switched) -> None:
    """One request: what the longest allowed draft does."""
    rounds, rows = (1 if bench.quick else 3), []
    for kind in KINDS:
        mosts = (0, *(LENGTHS[-1:] if bench.quick else LENGTHS))
        runs = engine.compare(texts(kind, 1, 32 if bench.quick else 96), mosts, rounds)
        for most in mosts[1:]:
            tpot = ratio(runs[most], runs[0], "tpot_s")
            found = guesses(runs[most][-1])
            bench.data.setdefault("lengths", {})[f"{kind}, {most}"] = {"tpot": tpot, **found}
            shown = [
                f"{found['acceptance']:.0%}",
                f"{found['accepted_length']:.2f}",
                f"{found['forwards_per_token']:.2f}",
            ]
            rows.append([kind, most, *shown, spread(tpot)])
    bench.data["tables"]["lengths"] = table(
        ["text, batch 1", "guesses at most", "accepted", "tokens per step", "forwards per token", "TPOT, ratio"],
        ["文本，批大小 1", "最多猜几个", "接受率", "每步 token", "每 token 的前向", "TPOT 之比"],
        rows,
        rows_zh=[[KINDS[row[0]], *row[1:]] for row in rows],
    )


def _draft_model(bench: Experiment) -> None:
    """The model as its own draft: every guess is right, and each costs as much as a token. What a real draft model saves
    is the difference of the two sizes."""
    rows = []
    with _engine(bench, speculative="draft", draft_model=bench.args.model) as engine:
        for kind in ("chat", "random"):
            runs = engine.compare(texts(kind, 1, 32 if bench.quick else 96), (0, 4), 1 if bench.quick else 3)
            tpot, found = ratio(runs[4], runs[0], "tpot_s"), guesses(runs[4][-1])
            bench.data.setdefault("own_draft", {})[kind] = {"tpot": tpot, **found}
            rows.append([kind, f"{found['acceptance']:.0%}", f"{found['forwards_per_token']:.2f}", spread(tpot)])
    bench.data["tables"]["own_draft"] = table(
        ["the model as its own draft", "accepted", "forwards per token", "TPOT, ratio"],
        ["模型给自己打草稿", "接受率", "每 token 的前向", "TPOT 之比"],
        rows,
        rows_zh=[[KINDS[row[0]], *row[1:]] for row in rows],
    )


def guesses(run: RunResult) -> dict[str, float]:
    """What became of the guesses of one run.

    acceptance: share of guesses that became output; accepted_length: tokens that a request gets from a step on average,
    its first token left out; forwards_per_token: the same turned round, so that 1 is no gain.
    """
    drafted, accepted = run.counters["draft_tokens"], run.counters["accepted_tokens"]
    later = run.output_tokens - len(run.requests)
    return {
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance": accepted / drafted if drafted else 0.0,
        "accepted_length": later / (later - accepted),
        "forwards_per_token": (later - accepted) / later,
    }


def spread(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f}–{found['max']:.2f})"


if __name__ == "__main__":
    cli.run_main(main)
