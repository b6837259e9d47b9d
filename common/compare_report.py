"""What a comparison says: medians and spread per engine and workload, tables, ratios, and the figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import plots
from common.compare_measure import floors_of
from common.compare_plan import Entry
from common.compare_state import State
from common.experiments import milliseconds, table
from common.harness import summarise
from common.workloads import Workload

Summary = dict[str, dict[str, dict[str, dict[str, float]]]]  # workload -> engine -> metric -> median and spread
RATIOS = ("output_tok_s", "total_s", "ttft_s", "tpot_s")
TITLES_ZH = {"output tok/s": "输出 tok/s", "total": "总时间"}


@dataclass(frozen=True)
class Metric:
    """One number of a run: how it is called, found and written."""

    key: str
    title: str
    title_zh: str
    show: Callable[[float], str]
    scale: float = 1.0  # from its unit in the result to that of the figure


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


METRICS = {
    metric.key: metric
    for metric in (
        Metric("output_tok_s", "output tok/s", "输出 tok/s", _speed),
        Metric("total_s", "total s", "总时间 s", lambda v: f"{v:.2f}"),
        Metric("ttft_s", "TTFT ms", "TTFT ms", milliseconds, 1e3),
        Metric("tpot_s", "TPOT ms", "TPOT ms", milliseconds, 1e3),
        Metric("itl_p99_s", "p99 gap ms", "间隔 p99 ms", milliseconds, 1e3),
        Metric("kv_utilisation", "KV use", "KV 利用率", _percent, 100.0),
        Metric("hit_rate", "hit rate", "命中率", _percent, 100.0),
        Metric("acceptance", "acceptance", "接受率", _percent, 100.0),
        Metric("forwarded_tokens", "forwarded", "前向 token", _count),
        Metric("peak_rss_bytes", "peak MiB", "内存峰值 MiB", _mib, 2.0**-20),
    )
}
# (metric, workloads in order of preference, title in the figure). The first workload that was measured is taken.
VIEWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("output_tok_s", ("offline", "shared_prefix"), "output tokens/s"),
    ("ttft_s", ("online", "offline", "latency"), "time to first token, ms"),
    ("tpot_s", ("latency", "offline"), "time per token, ms"),
    ("itl_p99_s", ("online", "offline", "latency"), "p99 gap of tokens, ms"),
    ("forwarded_tokens", ("latency",), "forwarded tokens"),
    ("forwarded_tokens", ("shared_prefix",), "forwarded tokens"),
    ("kv_utilisation", ("offline", "multi_turn", "latency"), "KV memory in use, %"),
    ("hit_rate", ("shared_prefix", "multi_turn"), "prefix hit rate, %"),
    ("acceptance", ("edit",), "drafts accepted, %"),
    ("tpot_s", ("edit",), "time per token, ms"),
    ("peak_rss_bytes", ("offline", "latency"), "peak memory, MiB"),
)


def metrics(run: dict[str, Any]) -> dict[str, float]:
    """The numbers of one run by metric, those left out that it does not have or that say nothing."""
    counters = run.get("counters") or {}
    found = {key: run.get(key) for key in METRICS} | {"forwarded_tokens": counters.get("forwarded_tokens")}
    hits, drafts = counters.get("prefix_hit_tokens"), counters.get("draft_tokens")
    if hits is not None and run["prompt_tokens"]:
        found["hit_rate"] = hits / run["prompt_tokens"]
    if drafts:
        found["acceptance"] = counters["accepted_tokens"] / drafts
    return {key: value for key, value in found.items() if value is not None}


def summary(state: State, rows: Sequence[Entry], works: Sequence[Workload]) -> Summary:
    """Median and spread over the rounds of every metric that all runs of an engine on a workload have."""
    out: Summary = {}
    for work in works:
        for row in rows:
            runs = [metrics(run) for run in state.series(work.name, row.name).values()]
            keys = [key for key in METRICS if runs and all(key in run for run in runs)]
            if keys:
                out.setdefault(work.name, {})[row.name] = {key: summarise(r[key] for r in runs) for key in keys}
    return out


def references(rows: Sequence[Entry], other: Entry) -> list[Entry]:
    """The rows that another one is set against: the last chapter as it is, and for a server of somebody else's its
    server too."""
    plain = [row for row in rows if row.is_chapter and row.kind == "engine" and "-" not in row.name]
    if not plain or other is plain[-1]:
        return []
    servers = [row for row in rows if row.kind == "server" and row.package == plain[-1].package]
    return [plain[-1], *servers] if other.kind == "url" else [plain[-1]]


def ratios(state: State, rows: Sequence[Entry], works: Sequence[Workload]) -> dict[str, Any]:
    """{workload: {"A_vs_B": {"of": A, "to": B, metric: summary of A / B taken round by round}}}, A the last chapter."""
    out: dict[str, Any] = {}
    for work in works:
        for other in rows:
            for ours in references(rows, other):
                a, b = state.series(work.name, ours.name), state.series(work.name, other.name)
                found: dict[str, Any] = {}
                for key in RATIOS:
                    pairs: list[tuple[Any, Any]] = [(a[i].get(key), b[i].get(key)) for i in a.keys() & b.keys()]
                    if pairs and all(x and y for x, y in pairs):
                        found[key] = summarise(x / y for x, y in pairs)
                if found:
                    names = {"of": ours.name, "to": other.name}
                    out.setdefault(work.name, {})[f"{ours.name}_vs_{other.name}"] = names | found
    return out


def views(found: Summary) -> list[tuple[Metric, str, str]]:
    """(metric, workload, title) of every number that some engine has."""
    out = []
    for key, wanted, title in VIEWS:
        for name in wanted:
            if any(key in values for values in found.get(name, {}).values()):
                out.append((METRICS[key], name, title))
                break
    return out


def measured(found: Summary, rows: Sequence[Entry]) -> list[Entry]:
    """The rows of which there is a number."""
    return [row for row in rows if any(row.name in engines for engines in found.values())]


def overview(found: Summary, rows: Sequence[Entry], errors: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The table of the first screen: one line per engine, each column a metric on the workload that shows it best."""
    shown = views(found)
    columns = ["engine", *(f"{m.title} ({w})" for m, w, _ in shown), *["logit error (rms)"] * bool(errors)]
    columns_zh = ["引擎", *(f"{m.title_zh}（{w}）" for m, w, _ in shown), *["logits 误差（rms）"] * bool(errors)]
    lines = []
    for row in measured(found, rows):
        cells = [_cell(found, w, row.name, m) for m, w, _ in shown]
        if errors:
            cells.append(f"{errors[row.name]['rms']:.1e}" if row.name in errors else "–")
        lines.append([row.name, *cells])
    return table(columns, columns_zh, lines)


def _cell(found: Summary, workload: str, name: str, metric: Metric, spread: bool = False) -> str:
    value = found.get(workload, {}).get(name, {}).get(metric.key)
    if value is None:
        return "–"
    text = metric.show(value["median"])
    wide = spread and value["n"] > 1 and value["max"] > value["min"]
    return f"{text} ({metric.show(value['min'])}–{metric.show(value['max'])})" if wide else text


def details(found: Summary, rows: Sequence[Entry], work: Workload, floor: dict[str, float]) -> dict[str, Any]:
    """The table of one workload: all metrics that some engine has, spread included, and the floors."""
    keys = [key for key in METRICS if any(key in values for values in found.get(work.name, {}).values())]
    ms = [METRICS[key] for key in keys]
    spread = {"output_tok_s", "ttft_s", "tpot_s"}
    lines = [
        [row.name, *(_cell(found, work.name, row.name, m, m.key in spread) for m in ms)]
        for row in rows
        if row.name in found.get(work.name, {})
    ]
    last = [m.show(floor[m.key]) if m.key in floor else "" for m in ms]
    return table(
        [work.name, *(m.title for m in ms)],
        [work.name, *(m.title_zh for m in ms)],
        [*lines, ["floor", *last]],
        rows_zh=[*lines, ["下限", *last]],
    )


def against(found: dict[str, Any], rows: Sequence[Entry]) -> dict[str, Any] | None:
    """The table of ratios to the peers and to other ways of running the last chapter; None without any."""
    chapters = {row.name for row in rows if row.is_chapter and row.kind == "engine"}
    lines = []
    for work, others in found.items():
        for values in others.values():
            if values["to"] not in chapters:
                cells = [
                    f"{v['median']:.2f} ({v['min']:.2f}–{v['max']:.2f})" if (v := values.get(key)) else "–"
                    for key in RATIOS
                ]
                lines.append([work, f"{values['of']} / {values['to']}", *cells])
    if not lines:
        return None
    titles = [METRICS[key].title.split()[0] if key.endswith("pot_s") else METRICS[key].title for key in RATIOS]
    titles = [title.removesuffix(" s").removesuffix(" ms") for title in titles]
    return table(
        ["workload", "ratio of", *titles], ["负载", "相比的双方", *(TITLES_ZH.get(t, t) for t in titles)], lines
    )


def figure(
    path: Path, found: Summary, rows: Sequence[Entry], errors: dict[str, dict[str, float]], tpot_floor: float | None
) -> None:
    """The small multiples: one panel per view, one bar per engine."""
    panels, rows = [], measured(found, rows)
    for metric, work, title in views(found):
        values: dict[str, Any] = {}
        for row in rows:
            value = found.get(work, {}).get(row.name, {}).get(metric.key)
            spread = value and tuple(value[key] * metric.scale for key in ("median", "min", "max"))
            values[row.name] = spread or None
        floor = tpot_floor * 1e3 if tpot_floor and metric.key == "tpot_s" and work in ("latency", "edit") else None
        panels.append(plots.BarPanel(f"{title}\n{work}", values, floor))
    if errors:
        values = {row.name: errors[row.name]["rms"] * 100 if row.name in errors else None for row in rows}
        panels.append(plots.BarPanel("logit error, %\nroot mean square", values))
    if panels:
        plots.bar_grid(panels, path)


def result(
    state: State, rows: Sequence[Entry], works: Sequence[Workload], config: dict[str, Any], notes: Sequence[str]
) -> dict[str, Any]:
    """Everything a result file holds besides its record of the host; prints the tables on the way."""
    found = summary(state, rows, works)
    floor = {work.name: floors_of(state, config, work) for work in works}
    kept = ratios(state, rows, works)
    tables = {work.name: details(found, rows, work, floor[work.name]) for work in works if work.name in found}
    if peers := against(kept, rows):
        tables["against"] = peers
    tables["overview"] = overview(found, rows, state.logits)
    split: list[tuple[Any, ...]] = [
        (key.split("/", 1)[0], *key.split("/", 1)[1].rsplit("/", 1), run) for key, run in state.runs.items()
    ]
    return {
        "machine": state.machine,
        "engines": {row.name: row.record() | {"versions": state.versions.get(row.name, {})} for row in rows},
        "workloads": {
            work.name: {
                "description": work.description,
                "requests": work.size,
                "prompt_tokens": work.prompt_tokens,
                "output_tokens": work.output_tokens,
                "floors": floor[work.name],
            }
            for work in works
        },
        "rounds": state.plan["rounds"],
        "notes": [*notes, *(f"{row.name}: {row.note}" for row in rows if row.note)],
        "failed": {name: text.splitlines()[0] for name, text in state.failed.items()},
        "summary": found,
        "ratios": kept,
        "logit_error": state.logits,
        "tables": tables,
        "runs": [run | {"workload": w, "engine": e, "round": int(i)} for w, e, i, run in split],
    }
