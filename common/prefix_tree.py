"""Show the tree of a prefix cache: as text beside a trace, as a picture in a README."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.trace import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT_WIDTH = 60  # columns of an edge's text
ROW, GAP = 0.36, 0.7  # height of a row in inches, space between a box and the next one in pages
TITLE = 0.44  # inches


@dataclass(frozen=True)
class Edge:
    """An edge of the tree as it was at one moment; the root is one without pages."""

    text: str
    pages: int
    locks: int
    below: tuple[Edge, ...]

    @property
    def total(self) -> int:
        """Pages of the edge and of all below it."""
        return self.pages + sum(edge.total for edge in self.below)

    @property
    def locked(self) -> int:
        return (self.pages if self.locks else 0) + sum(edge.locked for edge in self.below)

    @property
    def rows(self) -> int:
        """Leaves below, itself if it is one: a path each."""
        return sum(edge.rows for edge in self.below) or 1

    @property
    def reach(self) -> float:
        """Pages of the longest path from here on, gaps included."""
        return self.pages + max((GAP + edge.reach for edge in self.below), default=0.0)


def snapshot(llm: Any) -> Edge | None:
    """The tree of a chapter's LLM now; None where it has no prefix cache, or has it switched off."""
    kv: Any = getattr(llm.engine, "kv", None)
    return _copy(kv.tree.root, llm.tokenizer.decode) if getattr(kv, "prefix_cache", False) else None


def _copy(node: Any, decode: Callable[[Sequence[int]], str]) -> Edge:
    below = tuple(_copy(child, decode) for child in node.children.values())
    return Edge(decode(node.tokens), len(node.pages), node.locks, below)


def lines(root: Edge) -> list[str]:
    """The tree as text, a line for each edge: its pages, how many running requests hold it, how its text begins."""
    if not root.total:
        return ["(empty)"]
    return [f"{_count(root.total, 'page')}, {root.locked} of them locked", *_below(root, "")]


def _below(node: Edge, indent: str) -> Iterator[str]:
    for edge in node.below:
        last = edge is node.below[-1]
        locks = f" · {_count(edge.locks, 'lock')}" if edge.locks else ""
        yield f"{indent}{'└── ' if last else '├── '}{_count(edge.pages, 'page')}{locks} · {short(edge.text, TEXT_WIDTH)}"
        yield from _below(edge, indent + ("    " if last else "│   "))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def figure(moments: Sequence[tuple[str, Edge]], path: str | Path) -> None:
    """Write a PNG of one tree at several moments, each with its title, below each other.

    An edge is a box as wide as its pages, right of the one that it continues; a path from left to right is a prefix.
    Boxes that running requests hold are filled. Raises ValueError without moments.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from common.plots import DPI, STYLE, WIDTH

    if not moments:
        raise ValueError("a figure needs a tree")
    heights = [TITLE + ROW * root.rows for _, root in moments]
    reach = max(root.reach for _, root in moments)
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI)
        FigureCanvasAgg(drawing)
        top = 1.0
        for (title, root), height in zip(moments, heights, strict=True):
            top -= height / sum(heights)
            space = (0.015, top, 0.97, ROW * root.rows / sum(heights))
            axes = drawing.add_axes(space, xlim=(GAP - 0.1, reach + 0.1), ylim=(root.rows - 0.4, -0.6))
            axes.axis("off")
            axes.set_title(title)
            _boxes(axes, root, 0.0, 0, WIDTH * 0.97 / reach)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Software": None})


def _boxes(axes: Axes, node: Edge, x: float, row: int, page_inches: float) -> None:
    """Draw what is below a node whose box ends at x in this row."""
    from matplotlib.patches import Rectangle

    from common.plots import COLOURS, INK, MUTED, PAPER

    first, blue = row, COLOURS["ch08"]
    for edge in node.below:
        left = x + GAP
        if node.pages:
            axes.plot([x, x + GAP / 2, x + GAP / 2, left], [first, first, row, row], color=MUTED, linewidth=1.0)
        face, ink = (blue, PAPER) if edge.locks else (PAPER, INK)
        axes.add_patch(Rectangle((left, row - 0.36), edge.pages, 0.72, facecolor=face, edgecolor=blue, linewidth=1.3))
        for page in range(1, edge.pages):
            for end in (-0.36, 0.36):  # a tick at each page boundary, above and below the text
                axes.plot([left + page] * 2, [row + end, row + 0.6 * end], color=ink, linewidth=0.8)
        letters = int(edge.pages * page_inches / 0.09)  # of 8.5 points, a wide one each
        axes.text(
            left + edge.pages / 2,
            row,
            short(edge.text.strip(), letters),
            ha="center",
            va="center",
            color=ink,
            fontsize=8.5,
        )
        _boxes(axes, edge, left + edge.pages, row, page_inches)
        row += edge.rows
