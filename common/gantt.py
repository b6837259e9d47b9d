"""A picture of who computes and who waits in each step of a run, made from its trace events.

A request holds a place (a row of the batch) while it runs. A place that nobody holds is drawn after the request that held
it last, so that the cells of a panel add up to steps × places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.trace import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFILL, DECODE, EMPTY = "#2f6b3a", "#8cc084", "#c0504d"


@dataclass
class Life:
    """One request, in engine steps (the first is 1)."""

    rid: int
    computed: dict[int, str] = field(default_factory=dict)  # step: "PREFILL" | "DECODE"
    empty: list[int] = field(default_factory=list)  # steps after its end in which nobody holds its place

    @property
    def start(self) -> int:
        return min(self.computed)

    @property
    def end(self) -> int:
        """The step that gave its last token."""
        return max(self.computed)

    @property
    def waits(self) -> list[int]:
        """Steps without a part in the batch before its end, those after a preemption included."""
        return [step for step in range(1, self.end) if step not in self.computed]


@dataclass
class Run:
    """What a panel shows."""

    title: str
    lives: list[Life]
    steps: int
    places: int

    @property
    def occupancy(self) -> float:
        """Share of the places × steps in which a request computed."""
        return sum(len(life.computed) for life in self.lives) / (self.steps * self.places)


def run_of(title: str, events: Sequence[Event], places: int) -> Run:
    """The run that left these events; all requests came before its first step. Raises ValueError without a step."""
    lives: dict[int, Life] = {}
    for event in events:
        if event.component == "Scheduler" and event.action == "schedule":
            lives.setdefault(event.rid, Life(event.rid)).computed[event.step] = event.state
    if not lives:
        raise ValueError("the events hold no step")
    order = sorted(lives.values(), key=lambda life: (life.start, life.rid))
    last = max(life.end for life in order)
    held: list[Life] = []  # by whom each place was held last
    for life in order:
        left = min((other for other in held if other.end < life.start), key=lambda other: other.end, default=None)
        if left is not None:
            held.remove(left)
            left.empty = list(range(left.end + 1, life.start))
        held.append(life)
    for life in held:
        life.empty = list(range(life.end + 1, last + 1))
    return Run(title, sorted(order, key=lambda life: life.rid), last, places)


def draw(runs: Sequence[Run], path: str | Path) -> None:
    """Write a PNG with one panel per run, one row per request and one column per step, all on one scale."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from common.plots import DPI, STYLE, WIDTH

    with matplotlib.rc_context(STYLE):
        rows = [len(run.lives) for run in runs]
        figure = Figure(
            figsize=(WIDTH, 0.9 + sum(0.62 + 0.19 * count for count in rows)), dpi=DPI, layout="constrained"
        )
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, run in zip(panels, runs, strict=True):
            _panel(axes, run, max(other.steps for other in runs))
        panels[-1].set_xlabel("engine step")
        _legend(figure)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, run: Run, steps: int) -> None:
    from common.plots import MUTED

    for row, life in enumerate(run.lives):
        for step, state in life.computed.items():
            axes.barh(row, 0.92, left=step - 0.46, height=0.72, color=PREFILL if state == "PREFILL" else DECODE)
        for step in life.waits:
            axes.plot([step - 0.5, step + 0.5], [row, row], color=MUTED, linewidth=1.2, solid_capstyle="butt")
        for step in life.empty:
            axes.barh(row, 0.84, left=step - 0.42, height=0.62, facecolor="none", edgecolor=EMPTY, linewidth=0.8)
    axes.set_title(run.title, fontsize=11.5)
    axes.set_ylim(len(run.lives) - 0.4, -0.6)
    axes.set_xlim(0.3, steps + 0.7)
    axes.set_yticks(range(len(run.lives)), [str(life.rid + 1) for life in run.lives], fontsize=9)
    axes.set_ylabel("request")
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _legend(figure: object) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from common.plots import MUTED

    handles = [
        Patch(color=PREFILL, label="computes its prompt"),
        Patch(color=DECODE, label="computes one token"),
        Line2D([], [], color=MUTED, linewidth=1.2, label="waits"),
        Patch(facecolor="none", edgecolor=EMPTY, label="place stays empty"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=10)  # type: ignore[attr-defined]
