"""Colours, markers and sizes of the figures; and how a figure takes on the page's colours."""

from __future__ import annotations

import io
import re

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
    rows: int,
    columns: int,
    *,
    panel: tuple[float, float],
    left: float = 0.75,
    gap: tuple[float, float] = (0.45, 0.25),
    widths: tuple[float, ...] | None = None,
    share: bool = True,
) -> tuple[Figure, np.ndarray]:
    """A figure of panels, sizes in inches, and its axes [rows, columns].

    Margins are given, for matplotlib's layout engines take longer than all the drawing; ``gap``
    is that between rows and between columns.
    """
    top, bottom, right = 0.62, 0.5, 0.15
    width = left + columns * panel[0] + (columns - 1) * gap[1] + right
    height = top + rows * panel[1] + (rows - 1) * gap[0] + bottom
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(
        rows,
        columns,
        sharey="row" if share else False,
        squeeze=False,
        width_ratios=widths,
        gridspec_kw={
            "left": left / width,
            "right": 1 - right / width,
            "top": 1 - top / height,
            "bottom": bottom / height,
            "wspace": gap[1] / panel[0],
            "hspace": gap[0] / panel[1],
        },
    )
    return figure, axes


def legend(figure: Figure, *axes: Axes) -> None:
    """One legend for all panels, at the top, each name once."""
    found: dict[str, Artist] = {}
    for one in axes:
        handles, names = one.get_legend_handles_labels()
        found |= {n: h for n, h in zip(names, handles, strict=True) if n not in found}
    if found:
        figure.legend(
            found.values(), found.keys(), loc="upper center", ncols=len(found), borderaxespad=0.1
        )


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
    for place, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--series-{place})")
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
