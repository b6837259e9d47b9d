"""Figures of measurements in one calm style: one colour per chapter, labels beside the lines, English text only.

A figure is a function of its data: the PNG holds no date and no version, so equal data gives an equal file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

INK, MUTED, GRID, PAPER = "#2b2f36", "#7a808a", "#e3e5e8", "#fcfcfb"
COLOURS = {
    "ch02": "#8d8d8d",
    "ch03": "#c0504d",
    "ch04": "#d98b2b",
    "ch05": "#b5a642",
    "ch06": "#5b9a4f",
    "ch07": "#2f8f8b",
    "ch08": "#3f78b5",
    "ch09": "#7560a8",
    "ch10": "#b0558f",
    "hf": "#59626f",
    "vllm": "#8a7a5c",
    "openvino": "#6d8a7a",
    "llama": "#8a6d80",
}
SPARE = ("#3f78b5", "#d98b2b", "#5b9a4f", "#b0558f", "#7560a8", "#2f8f8b")
# Inches and dots: 1280 pixels wide, shown at about 830 in a README, so that 11 points stay legible there.
WIDTH, HEIGHT, DPI = 8.0, 4.2, 160
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
}


@dataclass(frozen=True)
class Panel:
    """One small plot: lines by name, and a floor that no engine on the machine can beat (drawn dashed)."""

    title: str
    series: Mapping[str, Points]
    floor: float | Points | None = None


def colour(name: str, place: int = 0) -> str:
    """Colour of a series: a chapter's own, by the first part of the name, else the one of its place in the figure."""
    return COLOURS.get(re.split("[_ -]", name)[0], SPARE[place % len(SPARE)])


def line_figure(
    series: Mapping[str, Points],
    path: str | Path,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    floor: float | Points | None = None,
    logx: bool = False,
    logy: bool = False,
) -> None:
    """Write a PNG of lines through (x, y) points, each with its name at its end. Raises ValueError without points."""
    with _figure(path, 1, HEIGHT) as all_axes:
        _draw(all_axes, [Panel(title, series, floor)], logx=logx, logy=logy)
        all_axes[0].set(xlabel=xlabel, ylabel=ylabel)


def small_multiples(
    panels: Sequence[Panel],
    path: str | Path,
    *,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
) -> None:
    """Write a PNG of two to four line plots side by side with one y axis. Raises ValueError for another number.

    Lines that have the same names in all panels are named in the last one only.
    """
    if not 2 <= len(panels) <= 4:
        raise ValueError(f"small multiples are two to four panels, not {len(panels)}")
    with _figure(path, len(panels), 3.4) as all_axes:
        _draw(all_axes, panels, logx=logx, logy=logy)
        for axes in all_axes:
            axes.set(xlabel=xlabel)
        all_axes[0].set(ylabel=ylabel)


def bar_figure(
    values: Mapping[str, float | tuple[float, float, float]],
    path: str | Path,
    *,
    title: str,
    xlabel: str,
    floor: float | None = None,
    floor_name: str = "floor",
    number: str = ".3g",
) -> None:
    """Write a PNG of one horizontal bar per name, first on top, its value at its end in the format `number`.

    A value may be (median, lowest, highest): the bar ends at the median, a thin line spans the rest. Raises ValueError
    without values.
    """
    if not values:
        raise ValueError("a figure needs values")
    with _figure(path, 1, 1.3 + 0.42 * len(values)) as (axes,):
        reach = max(_spread(value)[2] for value in values.values())
        for place, (name, value) in enumerate(values.items()):
            middle, low, high = _spread(value)
            axes.barh(place, middle, height=0.62, color=colour(name, place))
            if high > low:
                axes.plot([low, high], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
            axes.text(high + reach * 0.012, place, format(middle, number), va="center", color=INK)
        if floor is not None:
            axes.axvline(floor, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.3)
            axes.annotate(
                f"{floor_name} {format(floor, number)}",
                (floor, 1),
                (4, 2),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=MUTED,
                fontsize=10,
            )
        axes.set_title(title, pad=6 if floor is None else 20)
        axes.set(xlabel=xlabel, xlim=(0, max(reach, floor or 0) * 1.12))
        axes.set_yticks(range(len(values)), list(values))
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")


@dataclass(frozen=True)
class BarPanel:
    """One small plot of a grid: a bar per name, (median, lowest, highest) or one number; None where there is none."""

    title: str
    values: Mapping[str, float | tuple[float, float, float] | None]
    floor: float | None = None


def bar_grid(panels: Sequence[BarPanel], path: str | Path, *, columns: int = 4) -> None:
    """Write a PNG of horizontal bars in a grid of panels that share their names, written once per row of the grid.

    Raises ValueError without panels or where their names differ.
    """
    if not panels or any(panel.values.keys() != panels[0].values.keys() for panel in panels):
        raise ValueError("a grid needs panels that have the same names")
    names = list(panels[0].values)
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    height = rows * (0.62 + 0.16 * len(names))
    with _figure(path, columns, height, rows, {"font.size": 8.5, "axes.titlesize": 9}) as all_axes:
        for place, axes in enumerate(all_axes):
            if place >= len(panels):
                axes.set_axis_off()
                continue
            _bars(axes, panels[place])
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0, labelleft=place % columns == 0)


def stack_figure(
    bars: Mapping[str, Mapping[str, float]], path: str | Path, *, title: str, xlabel: str, shades: Mapping[str, str]
) -> None:
    """Write a PNG of horizontal bars, each made of parts {part: length}, in the colours that `shades` gives the parts.

    Parts are drawn in the order of `shades`. Raises ValueError without bars.
    """
    if not bars:
        raise ValueError("a figure needs values")
    with _figure(path, 1, 1.9 + 0.42 * len(bars)) as (axes,):
        for place, parts in enumerate(bars.values()):
            left = 0.0
            for part, shade in shades.items():
                axes.barh(place, parts.get(part, 0.0), left=left, height=0.62, color=shade)
                left += parts.get(part, 0.0)
            axes.text(left, place, f"  {short_number(left)}", va="center", color=INK)
        axes.set_title(title)
        axes.set(xlabel=xlabel)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.grid(False, axis="y")
        used = [part for part in shades if any(parts.get(part) for parts in bars.values())]
        handles = [_patch(shades[part]) for part in used]
        axes.figure.legend(handles, used, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)


def _patch(shade: str) -> Any:
    """A filled square for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=shade)


def short_number(value: float) -> str:
    """Three significant digits, and no exponent for what is not tiny: 0.0123, 7.4, 1,067."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bars(axes: "Axes", panel: BarPanel) -> None:
    shown = [_spread(value)[2] for value in panel.values.values() if value is not None]
    reach = max([*shown, panel.floor or 0.0]) or 1.0
    for place, (name, value) in enumerate(panel.values.items()):
        if value is None:
            axes.text(reach * 0.02, place, "–", va="center", color=MUTED)
            continue
        middle, low, high = _spread(value)
        axes.barh(place, middle, height=0.66, color=colour(name, place))
        if high > low:
            axes.plot([low, high], [place, place], color=INK, linewidth=1.0, solid_capstyle="butt")
        axes.text(high + reach * 0.03, place, short_number(middle), va="center", color=INK, fontsize=8)
    if panel.floor is not None:
        axes.axvline(panel.floor, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
        axes.text(panel.floor, len(panel.values) - 0.42, "floor", va="top", ha="center", color=MUTED, fontsize=7)
    axes.set_title(panel.title)
    axes.set(xlim=(0, reach * 1.42))  # room for the numbers
    axes.set_xticks([])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)


def tpot_vs_context(
    series: Mapping[str, Sequence[tuple[int, float]]], floor: float | Points | None, path: str | Path
) -> None:
    """Write a PNG of the time per output token, given in seconds, over the context length in tokens."""
    scaled = {name: _milliseconds(points) for name, points in series.items()}
    if isinstance(floor, int | float):
        floor = floor * 1e3
    elif floor is not None:
        floor = _milliseconds(floor)
    line_figure(
        scaled,
        path,
        title="Time per output token by context length",
        xlabel="context (tokens)",
        ylabel="TPOT (ms)",
        floor=floor,
    )


def _milliseconds(points: Points) -> list[tuple[float, float]]:
    return [(x, y * 1e3) for x, y in points]


def _spread(value: float | tuple[float, float, float]) -> tuple[float, float, float]:
    return value if isinstance(value, tuple) else (value, value, value)


@contextmanager
def _figure(
    path: str | Path, columns: int, height: float, rows: int = 1, style: Mapping[str, Any] | None = None
) -> Iterator[list["Axes"]]:
    """The axes, row by row, of a figure in this style; it is saved to `path` when the block succeeds."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | dict(style or {})):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield list(figure.subplots(rows, columns, sharey=rows == 1, squeeze=False).flat)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def _draw(all_axes: Sequence["Axes"], panels: Sequence[Panel], *, logx: bool, logy: bool) -> None:
    ends = [_lines(axes, panel, logx=logx, logy=logy) for axes, panel in zip(all_axes, panels, strict=True)]
    if not logy:
        # Only when all lines are there: a limit set by hand ends the automatic scaling of the shared axis.
        all_axes[0].set_ylim(bottom=0)
    for axes, panel, found in zip(all_axes, panels, ends, strict=True):
        if panel is panels[-1] or panel.series.keys() != panels[-1].series.keys():
            _label_ends(axes, found)


def _lines(axes: "Axes", panel: Panel, *, logx: bool, logy: bool) -> list[tuple[float, float, str, str]]:
    """Draw one panel; returns where each line ends, with its name and colour."""
    if not panel.series or not all(panel.series.values()):
        raise ValueError(f"figure {panel.title!r} has a series without points")
    if logx:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if logy:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    ends = []
    for place, (name, points) in enumerate(panel.series.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour(name, place), marker="o", markeredgecolor=PAPER)
        ends.append((xs[-1], ys[-1], name, colour(name, place)))
    if panel.floor is not None:
        first = min(p[0] for points in panel.series.values() for p in points)
        last = max(p[0] for points in panel.series.values() for p in points)
        limit = panel.floor
        points = [(first, limit), (last, limit)] if isinstance(limit, int | float) else limit
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.3)
        ends.append((xs[-1], ys[-1], "floor", MUTED))
    axes.set_title(panel.title)
    return ends


def _label_ends(axes: "Axes", ends: list[tuple[float, float, str, str]]) -> None:
    """Write each name right of its line's end, moved up where two would overlap."""
    axes.figure.canvas.draw()  # the scale of the axes is only known then
    gap = 13.0 * axes.figure.dpi / 72
    lowest = float("-inf")
    for x, y, name, shade in sorted(ends, key=lambda end: end[1]):
        at = axes.transData.transform((x, y))[1]
        shown = max(at, lowest + gap)
        lowest = shown
        offset = (6, (shown - at) * 72 / axes.figure.dpi)
        axes.annotate(name, (x, y), offset, textcoords="offset points", color=shade, va="center", annotation_clip=False)
