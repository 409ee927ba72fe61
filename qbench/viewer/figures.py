"""Write the tables and the softpick paper's figures of `qbench analyze`; the viewer has the rest.

matplotlib lays them out; text stays text, and equal analyses give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from qbench.files import write_atomically
from qbench.records import Analysis, Head
from qbench.store import Analyses, Store
from qbench.tables.analyses import analyses_csv, load_analyses, markdown

WIDTH = 6.4  # inches
EPSILON = "0.3"  # of sink rates
# Okabe and Ito's palette, which any colour vision tells apart; markers do so too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d4d4d2",
    "image.cmap": "cividis",
    "image.aspect": "auto",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def write_analyses(store: Store) -> list[Path]:
    """Write ``tables.md``, ``analyses.csv`` (removed if it would be empty) and the figures into the
    folder of the analyses; return the paths, Markdown first. Raises ResultsError for damage."""
    results = load_analyses(store)
    folder = Analyses(store.directory).directory
    contents = {"tables.md": markdown(results), "analyses.csv": analyses_csv(results)}
    paths = []
    for name, text in contents.items():
        if text:
            paths.append(folder / name)
            write_atomically(paths[-1], text.encode())
        else:  # of an earlier analysis, which had rows
            (folder / name).unlink(missing_ok=True)
    with rc_context(STYLE):
        for draw in (boxes, sinks) if results.cells else ():
            paths.append(folder / "figures" / f"{draw.__name__}.svg")
            save_svg(draw(results.cells), paths[-1])
    return paths


def save_svg(figure: Figure, path: Path) -> None:
    """Write ``figure`` to ``path``; the same figure and file name give the same bytes."""
    target = io.StringIO()
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    write_atomically(path, target.getvalue().encode())


def _panels(rows: int, columns: int = 1, *, height: float) -> tuple[Figure, NDArray]:
    """Return a figure and its axes [rows, columns]; ``height`` in inches per row."""
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def boxes(cells: Sequence[Analysis]) -> Figure:
    """Return a figure of hidden states after each decoder layer, a row per cell (the paper's figure
    5): quartiles as boxes, whiskers to the extremes, dashes at 0.1 % and 99.9 %."""
    figure, grid = _panels(len(cells), height=2.3)
    hidden = [layer.hidden for cell in cells for layer in cell.measured.layers]
    reach = max(max(-each.minimum, each.maximum) for each in hidden)
    for place, (cell, (axes,)) in enumerate(zip(cells, grid, strict=True)):
        states = [layer.hidden for layer in cell.measured.layers]
        names = {"q1": "0.25", "med": "0.5", "q3": "0.75"}
        stats = [
            {key: state.quantiles[level] for key, level in names.items()}
            | {"whislo": state.minimum, "whishi": state.maximum}
            for state in states
        ]
        colour = COLOURS[place % len(COLOURS)]
        axes.bxp(
            stats, positions=range(len(stats)), showfliers=False, patch_artist=True, widths=0.6,
            manage_ticks=False,
            boxprops={"facecolor": colour, "edgecolor": colour}, whiskerprops={"color": colour},
            capprops={"color": colour}, medianprops={"color": "#2b2b2b"},
        )  # fmt: skip
        for level in ("0.001", "0.999"):
            values = [state.quantiles[level] for state in states]
            axes.plot(range(len(stats)), values, "_", color="#2b2b2b", markersize=6)
        axes.set_ylim(-1.05 * reach, 1.05 * reach)
        axes.set(title=cell.cell, xlabel="decoder layer", ylabel="activation")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.grid(visible=True)
    return figure


def sinks(cells: Sequence[Analysis]) -> Figure:
    """Return a figure with two heat maps per cell by layer and head: the share of texts on which a
    head's mean weight on the first key exceeds 0.3, and that mean weight."""
    figure, grid = _panels(len(cells), 2, height=2.2)
    for cell, (left, right) in zip(cells, grid, strict=True):
        rate = _of_heads(cell, lambda head: head.sinks[0].rates[EPSILON])
        weight = _of_heads(cell, lambda head: head.sinks[0].attention)
        for axes, values, name in ((left, rate, "sink rate"), (right, weight, "first key")):
            image = axes.imshow(values, vmin=0, vmax=1, origin="lower")
            figure.colorbar(image, ax=axes)
            axes.set(title=f"{cell.cell}: {name}", xlabel="layer", ylabel="head")
            axes.locator_params(integer=True)
    return figure


def _of_heads(cell: Analysis, value: Callable[[Head], float]) -> NDArray[np.float64]:
    """Return ``value`` of each head as [heads, layers]; NaN if a layer has no such head."""
    layers = cell.measured.layers
    grid = np.full((max(len(layer.heads) for layer in layers), len(layers)), np.nan)
    for column, layer in enumerate(layers):
        for row, head in enumerate(layer.heads):
            grid[row, column] = value(head)
    return grid
