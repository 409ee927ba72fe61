"""Colours, markers and sizes of the figures; and how a figure takes on the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#2b2b2b"
LINE = "#d4d4d2"
# Okabe and Ito's palette, told apart with any colour vision; markers and dashes tell as well.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", "-", "--")
HATCHES = ("", "////", "....", "xxxx")
LONGEST = 24  # characters of a name
WIDTH = 4.3  # inches of every figure: text is as large as the page's on a phone

RC = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titley": 1.0,  # a place that is looked for takes as long as drawing a panel's ticks
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "lines.markersize": 5.0,
    "svg.fonttype": "none",  # text stays text: small, searchable, and read aloud
    "pdf.fonttype": 3,  # embedding whole TrueType fonts takes three times as long
    "savefig.dpi": 150,
}


def panels(
    heights: Sequence[float],
    *,
    left: float,
    named: Sequence[str],
    columns: Sequence[float] = (1.0,),
    between: float = 0.62,
    share: bool = False,
    right: float = 0.14,
    gap: float = 0.18,
    bottom: float = 0.56,
) -> tuple[Figure, np.ndarray]:
    """A figure as wide as a phone shows it, with panels below each other; axes [rows, columns].

    Sizes are in inches, ``gap`` is between columns; ``columns`` are relative widths; ``named`` is
    what the legend has to name. Margins are given, for matplotlib's layout engines take longer
    than all the drawing.
    """
    top = 0.34 + 0.18 * -(-len(named) // _abreast(named))
    height = top + sum(heights) + (len(heights) - 1) * between + bottom
    figure = Figure(figsize=(WIDTH, height))
    room = (WIDTH - left - right - (len(columns) - 1) * gap) / len(columns)
    axes = figure.subplots(
        len(heights),
        len(columns),
        sharey="row" if share else False,
        squeeze=False,
        width_ratios=columns,
        height_ratios=heights,
        gridspec_kw={
            "left": left / WIDTH,
            "right": 1 - right / WIDTH,
            "top": 1 - top / height,
            "bottom": bottom / height,
            "wspace": gap / room,
            "hspace": between / (sum(heights) / len(heights)),
        },
    )
    return figure, axes


def room_for(labels: Sequence[str]) -> float:
    """Inches that the longest of ``labels``, cut to fit, takes to the left of an axis."""
    return 0.22 + 0.068 * max((len(cut(label)) for label in labels), default=0)


def cut(label: str) -> str:
    """The end of a name that is too long for a figure, which tells cells apart."""
    return label if len(label) <= LONGEST else f"…{label[1 - LONGEST :]}"


def _abreast(names: Sequence[str]) -> int:
    """Entries of a legend that fit beside each other."""
    widest = max((0.42 + 0.075 * len(cut(name)) for name in names), default=1.0)
    return max(1, min(len(names), int(WIDTH / widest)))


def legend(figure: Figure, *axes: Axes) -> None:
    """One legend for all panels, at the top, each name once."""
    found: dict[str, Artist] = {}
    for one in axes:
        handles, names = one.get_legend_handles_labels()
        found |= {n: h for n, h in zip(names, handles, strict=True) if n not in found}
    if found:
        figure.legend(
            found.values(), map(cut, found), loc="upper center", ncols=_abreast(list(found)),
            borderaxespad=0.1, labelspacing=0.3, columnspacing=1.2,
        )  # fmt: skip


def fix_empty_labels(figure: Figure) -> None:
    """Matplotlib measures all tick labels to place an axis label, even one without text."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.get_label_text():
                axis.set_label_coords(0.5, 0.0)


def inline(svg_text: str, *, label: str) -> str:
    """An SVG to stand in the page: the page's colours, no ids but those that it refers to."""
    text = svg_text[svg_text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    referred = set(re.findall(r"(?:href=\"|url\()#([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", text)
    for colour, variable in ((INK, "ink"), (LINE, "line")):
        text = text.replace(colour, f"var(--{variable})")
    for index, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--series-{index})")
    return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(label)}"', 1)


def svg(figure: Figure, *, name: str) -> str:
    """SVG text on a transparent ground; the same figure gives the same text."""
    target = io.StringIO()
    with rc_context({**RC, "svg.hashsalt": name}):
        FigureCanvasSVG(figure)
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    return target.getvalue()


def _attribute(text: str) -> str:
    escapes = {"&": "&amp;", '"': "&quot;", "<": "&lt;", ">": "&gt;"}
    return "".join(escapes.get(character, character) for character in text)
