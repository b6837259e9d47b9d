"""A trace as a sequence diagram (PNG): one lifeline per component, one row per event, one band per engine step.

Drawn on a bare Figure with the Agg canvas, in inches from the top left corner; pyplot and its global state are never
touched. The picture is 10 inches wide, so at the ~1000 px of a README 8 pt text is 11 px high.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.trace import OFFICIAL_NOTE, Component, Event, lengths, short, used_components

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ft2font import FT2Font

# one family is enough; Simplified Chinese first, then any face that has the characters
CJK_FAMILIES = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "STHeiti", "Microsoft YaHei", "SimHei",
    "DengXian", "SimSun", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans CJK", "Droid Sans Fallback",
)  # fmt: skip
CJK_FILES = ("notosanscjk", "notosanssc", "sourcehansans", "wqy", "pingfang", "msyh", "simhei", "droidsansfallback")
LATIN = "DejaVu Sans"  # ships with matplotlib

STATE_COLOURS = {
    "WAITING": "#b26a00",
    "PREFILL": "#1565c0",
    "DECODE": "#2e7d32",
    "FINISHED": "#6a1b9a",
    "ABORTED": "#b71c1c",
}
INK, GREY, RULE, BANDS = "#212121", "#757575", "#bdbdbd", ("#f1f4f8", "#ffffff")

WIDTH, GUTTER, MARGIN, DPI = 10.0, 1.0, 0.1, 200
TITLE, HEADER, ROW, GAP, FOOTER = 0.42, 0.62, 0.25, 0.3, 0.42
MAX_EVENTS, BAND_EVENTS = 64, 40


@dataclass(frozen=True, slots=True)
class Band:
    """The events of one step, or (``gap`` set) the words that stand for what is left out."""

    step: int
    events: tuple[Event, ...] = ()
    gap: str = ""

    @property
    def phase(self) -> str:
        phases = {e.state for e in self.events if e.state in ("PREFILL", "DECODE")}
        return "MIXED" if len(phases) > 1 else "".join(phases)

    @property
    def label(self) -> str:
        if not self.step:
            return "before step 1"
        return f"step {self.step} · {self.phase}" if self.phase else f"step {self.step}"


def bands(events: Sequence[Event]) -> list[Band]:
    """One band per run of events of one step. Long traces lose their middle: the first and the last steps stay.

    The gap says ``alike`` only where every omitted step does the same things in the same order and states.
    """
    runs: list[list[Event]] = []
    for e in events:
        if runs and runs[-1][0].step == e.step:
            runs[-1].append(e)
        else:
            runs.append([e])
    if len(events) <= MAX_EVENTS:
        return [Band(run[0].step, tuple(run)) for run in runs]
    head, tail, left = 1, 1, MAX_EVENTS - len(runs[0]) - len(runs[-1])
    while head + tail < len(runs):  # in turn, so that both ends show about as many steps
        grow_head = head <= tail
        size = len(runs[head] if grow_head else runs[-tail - 1])
        if size > left:
            break
        left -= size
        head, tail = head + grow_head, tail + (not grow_head)
    hidden = runs[head:-tail] if head + tail <= len(runs) else []
    out = [part for run in runs[:head] for part in cut(run)]
    if hidden:
        alike = len({tuple((e.component, e.action, e.state) for e in run) for run in hidden}) == 1
        span = f"step {hidden[0][0].step}" if len(hidden) == 1 else f"steps {hidden[0][0].step}–{hidden[-1][0].step}"
        words = "alike" if alike and len(hidden) > 1 else "not drawn"
        out.append(Band(hidden[0][0].step, gap=f"… {span} {words} …"))
    return out + [part for run in runs[max(head, len(runs) - tail) :] for part in cut(run)]


def cut(run: Sequence[Event]) -> Iterator[Band]:
    """One step as bands; a step of very many events (many requests in one batch) shows its first and last ones."""
    if len(run) <= BAND_EVENTS:
        yield Band(run[0].step, tuple(run))
        return
    yield Band(run[0].step, tuple(run[: BAND_EVENTS // 2]))
    yield Band(run[0].step, gap=f"… {len(run) - BAND_EVENTS // 2 - 5} events not drawn …")
    yield Band(run[0].step, tuple(run[-5:]))


@lru_cache(maxsize=1)
def cjk_font() -> str | None:
    """The family name of an installed font with Chinese characters, or None.

    matplotlib keeps a list of fonts on disk and does not look again after a font was installed, so the system is asked
    where the list has none; what is found there is registered for this process.
    """
    from matplotlib import font_manager

    def listed() -> str | None:
        names = {f.name for f in font_manager.fontManager.ttflist}
        return next((family for family in CJK_FAMILIES if family in names), None)

    if family := listed():
        return family
    for path in font_manager.findSystemFonts():
        if Path(path).name.lower().replace("-", "").startswith(CJK_FILES):
            with suppress(OSError, RuntimeError):  # a damaged file, or a format that FreeType cannot open
                font_manager.fontManager.addfont(path)
    return listed()


def families() -> list[str]:
    """Font families in order of preference: matplotlib falls back per character from the first to the next."""
    font = cjk_font()
    return [LATIN, font] if font else [LATIN]


@contextmanager
def drawing() -> Iterator[None]:
    """Our fonts and plain text, whatever the caller's rcParams say; all of it is undone at the end."""
    import matplotlib

    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)  # a family without a bold face is drawn in its regular one: nothing to report
    try:
        with matplotlib.rc_context({"font.family": families(), "text.usetex": False, "text.parse_math": False}):
            yield
    finally:
        log.setLevel(level)


@lru_cache(maxsize=8)
def _face(family: str) -> FT2Font:
    from matplotlib import font_manager

    return font_manager.get_font(font_manager.findfont(family, fallback_to_default=False))


def drawable(text: str, fonts: Sequence[str]) -> str:
    """``text`` with ``·`` for every character that none of the fonts can draw, and for U+FFFD (a cut character)."""
    faces = [_face(family) for family in fonts]
    return "".join(c if c != "\ufffd" and any(f.get_char_index(ord(c)) for f in faces) else "·" for c in text)


def token_label(event: Event, fonts: Sequence[str]) -> str:
    """The token's id and its text in quotes; the id alone where no character of the text can be drawn."""
    said = drawable(short(event.text, 24), fonts)
    quoted = f"'{said}'" if said else ""
    if event.token is None:
        return quoted
    lost = "·" in said and not said.strip("· …")
    return str(event.token) if lost or not said else f"{event.token} {quoted}"


@dataclass(frozen=True, slots=True)
class Word:
    """A piece of a label."""

    text: str
    colour: str = INK
    bold: bool = False


@dataclass
class Canvas:
    """Axes in inches, y downwards, with the x of every lifeline; ``several``: rows name their request."""

    figure: Figure
    ax: Axes
    fonts: list[str]
    height: float
    x: dict[str, float]
    several: bool

    def text(
        self, x: float, y: float, text: str, size: float, colour: str = INK, width: float = WIDTH, **style: Any
    ) -> None:
        """One text, in a smaller size where it is wider than ``width`` inches."""
        t = self.ax.text(x, y, drawable(text, self.fonts), size=size, color=colour, zorder=5, **style)
        wide = t.get_window_extent().width / DPI
        t.set_fontsize(size * min(1.0, width / max(wide, 1e-6)))

    def words(self, left: float, right: float, y: float, words: Sequence[Word], paper: str, size: float = 7.5) -> None:
        """A line of differently styled words above ``y``, from ``left``, or ending at the page where it is too long."""
        from matplotlib.patches import Rectangle

        drawn = []
        for w in words:
            weight = "bold" if w.bold else "normal"
            t = self.ax.text(0, y, w.text, size=size, color=w.colour, weight=weight, va="baseline", zorder=5)
            drawn.append((t, t.get_window_extent().width / DPI))
        space = 0.05
        total = sum(width for _, width in drawn) + space * (len(drawn) - 1)
        x = max(GUTTER, left if left + total <= right else right - total)
        box = Rectangle((x - 0.02, y - 0.115), total + 0.04, 0.15, facecolor=paper, edgecolor="none", zorder=4)
        self.ax.add_patch(box)  # hides the lifelines behind the words
        for t, width in drawn:
            t.set_x(x)
            x += width + space


def canvas(height: float, hops: Sequence[Component], fonts: list[str], several: bool) -> Canvas:
    """An empty page of WIDTH × ``height`` inches with evenly spaced lifelines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(height, 0))
    ax.set_axis_off()
    pitch = (WIDTH - GUTTER - MARGIN) / max(len(hops), 1)
    x = {c.name: GUTTER + pitch * (i + 0.5) for i, c in enumerate(hops)}
    return Canvas(figure, ax, fonts, height, x, several)


def draw_header(page: Canvas, hops: Sequence[Component], title: str) -> None:
    """Title and one box per lifeline: the component, its file here, and small in grey the official file."""
    from matplotlib.patches import FancyBboxPatch

    page.text(MARGIN, 0.22, short(title, 105), 10, weight="bold", va="center")
    width = min(1.5, (WIDTH - GUTTER - MARGIN) / len(hops) - 0.06)
    for c in hops:
        x = page.x[c.name]
        box = FancyBboxPatch((x - width / 2, TITLE), width, HEADER, "round,pad=0,rounding_size=0.04", zorder=3)
        box.set(facecolor="#e8eaf6", edgecolor="#7986cb", linewidth=0.8)
        page.ax.add_patch(box)
        centre: dict[str, Any] = {"ha": "center", "va": "center", "width": width - 0.06}
        page.text(x, TITLE + 0.12, c.name, 8, weight="bold", **centre)
        page.text(x, TITLE + 0.27, Path(c.file).name, 6.5, **centre)
        official = c.official if len(c.official) * 0.05 < width else c.official.replace("/", "/\n", 1)
        for i, line in enumerate(official.split("\n")):
            page.text(x, TITLE + 0.41 + 0.105 * i, line, 5.5, GREY, **centre)


def label(event: Event, colour: str, fonts: Sequence[str], several: bool) -> list[Word]:
    """What stands on an arrow: (request,) action, state, cached_len/extend_len, token, and what else is known."""
    words = [Word(f"#{event.rid}", GREY)] if several else []
    words.append(Word(event.action, colour, bold=True))
    if event.state:
        words.append(Word(event.state, colour))
    extra = [lengths(event), token_label(event, fonts)]
    if event.length and not lengths(event):
        extra.append(f"{event.length} tokens")
    if event.pages:
        extra.append(f"{event.pages} page{'s' * (event.pages > 1)}")
    if event.dur:
        extra.append(f"{event.dur * 1e3:.1f} ms" if event.dur >= 1e-3 else f"{event.dur * 1e6:.0f} µs")
    extra.append(f"({drawable(short(event.note, 24), fonts)})" if event.note else "")
    return words + [Word(text) for text in extra if text]


def draw_event(page: Canvas, event: Event, before: Event | None, y: float, colour: str, paper: str) -> None:
    """One row: the arrow that hands the request over to the event's component, or a dot where it stays there."""
    x = page.x[event.component]
    start = page.x[before.component] if before else x
    if start != x:
        back = before is not None and before.step != event.step  # the engine loop starts over: no message is passed
        line = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "linestyle": (0, (4, 2)) if back else "solid"}
        line |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
        page.ax.annotate("", (x, y), (start, y), arrowprops=line, zorder=4.5)  # above the paper of the words
    else:
        page.ax.plot([x], [y], "o", color=colour, markersize=4, zorder=4.5)
    left = min(start, x) + 0.06
    page.words(left, WIDTH - MARGIN, y - 0.06, label(event, colour, page.fonts, page.several), paper)


def draw_bands(page: Canvas, parts: Sequence[Band]) -> None:
    """The bands from the header down, each with its events; the colour of a row is its request's state so far."""
    from matplotlib.patches import Rectangle

    y, before = TITLE + HEADER + 0.06, None
    states: dict[int, str] = {}
    for i, band in enumerate(parts):
        paper = BANDS[i % 2]
        height = GAP if band.gap else ROW * len(band.events) + 0.08
        page.ax.add_patch(Rectangle((0, y), WIDTH, height, facecolor=paper, edgecolor="none", zorder=0))
        if band.gap:
            middle = [Word(band.gap, GREY)]
            page.words((WIDTH + GUTTER) / 2 - 0.9, WIDTH, y + height / 2 + 0.04, middle, paper)
            y, before = y + height, None
            continue
        colour = STATE_COLOURS.get(band.phase, GREY)
        page.text(MARGIN, y + 0.18, band.label, 7, colour, GUTTER - MARGIN, weight="bold", va="baseline")
        for j, event in enumerate(band.events):
            state = states.get(event.rid, "")
            states[event.rid] = event.state or state
            colour = STATE_COLOURS.get(states[event.rid], INK)
            if j and event.state == state:  # said by the colour; in words where it changes and first in a band
                event = replace(event, state="")
            draw_event(page, event, before, y + ROW * (j + 1) - 0.02, colour, paper)
            before = event
        y += height
    for x in page.x.values():
        page.ax.plot([x, x], [TITLE + HEADER, y], color=RULE, linewidth=0.9, zorder=1)


def draw_footer(page: Canvas) -> None:
    """The legend: colours of the states, what n/m means, and where the official names come from."""
    y = page.height - 0.24
    words = [Word(name, colour, bold=True) for name, colour in STATE_COLOURS.items()]
    words += [Word("· n/m: cached_len/extend_len · dashed: the engine loop goes on", GREY)]
    page.words(MARGIN + GUTTER, WIDTH, y, words, "white", 6.5)
    page.text(MARGIN + GUTTER, y + 0.15, OFFICIAL_NOTE, 6.5, GREY, va="baseline")


def figure(events: Sequence[Event], components: Sequence[Component], title: str) -> Figure:
    """The diagram as a matplotlib Figure that is not yet saved. Call it, and save, inside ``drawing()``."""
    fonts = families()
    order = {c.name: i for i, c in enumerate(components)}  # those that nobody described come last
    hops = sorted(used_components(events, components), key=lambda c: order.get(c.name, len(order)))
    parts = bands(events)
    rows = sum(GAP if b.gap else ROW * len(b.events) + 0.08 for b in parts)
    page = canvas(TITLE + HEADER + 0.06 + rows + FOOTER, hops, fonts, len({e.rid for e in events}) > 1)
    draw_header(page, hops, title)
    draw_bands(page, parts)
    draw_footer(page)
    return page.figure


def sequence_diagram(events: Sequence[Event], components: Sequence[Component], path: Path, title: str) -> None:
    """Write the sequence diagram as a PNG, 2000 px wide. Raises ValueError without events, OSError from writing."""
    if not events:
        raise ValueError("there are no events to draw")
    with drawing():
        figure(events, components, title).savefig(path, format="png", dpi=DPI)
