"""Figures of one pass over a text: boxes, largest values, sinks, sparsity, attention maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qbench.records import Analysis, AttentionMap, Layer, Measured
from qbench.report.costs import Found
from qbench.report.style import INK, cut, legend, panels
from qbench.report.why_series import Replicates, names, series

MAP = "cividis"  # alike for all colour vision, and even in brightness
LEFT = 0.74  # inches
BARS = {"right": 0.5, "gap": 0.62}  # inches: room for the numbers of colour bars


def figures(
    cells: Sequence[Analysis], replicates: Replicates
) -> list[Callable[[], Iterator[Found]]]:
    """What draws those that there is something for."""
    whole = [one for one in cells if one.measured is not None]
    makers: list[Callable[[], Iterator[Found]]] = []
    if whole:
        headed = [one for one in whole if any(layer.heads for layer in _layers(one))]
        makers += [
            lambda: largest(whole, replicates),
            lambda: boxes([one for one in whole if _layers(one)[0].hidden.quantiles], replicates),
            lambda: sinks(headed),
            lambda: sparsity(headed, replicates),
        ]
        makers += [lambda one=one: maps(one) for one in whole]
    return makers


def few_powers(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, at all digits where it spans
    less than a fivefold, written as numbers."""
    low, high = axis.get_view_interval()
    narrow = 0 < low <= high < 5 * low
    subs = range(1, 10) if narrow else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=[float(one) for one in subs], numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def largest(cells: Sequence[Analysis], replicates: Replicates) -> Iterator[Found]:
    looks = series(cells, replicates)
    figure, grid = panels([1.8], left=LEFT, named=names(looks))
    axes = grid[0][0]
    for one, look in zip(cells, looks, strict=True):
        values = [max(-x.hidden.minimum, x.hidden.maximum) for x in _layers(one)]
        axes.plot(range(len(values)), values, **look.line)
    axes.set_yscale("log")
    few_powers(axes.yaxis)
    _layer_axis(axes)
    axes.set_ylabel("largest |x|")
    legend(figure, axes)
    yield (
        "largest",
        "Largest hidden activation after each decoder layer (the softpick paper's figure 1). "
        "Numbers: layers.csv.",
        figure,
    )


def boxes(cells: Sequence[Analysis], replicates: Replicates) -> Iterator[Found]:
    if not cells:
        return
    figure, grid = panels([1.7] * len(cells), left=LEFT, named=[], between=0.7)
    reach = max(max(-x.hidden.minimum, x.hidden.maximum) for one in cells for x in _layers(one))
    looks = series(cells, replicates)
    for one, look, axes in zip(cells, looks, grid[:, 0], strict=True):
        stats = [
            {
                "q1": x.hidden.quantiles["0.25"],
                "med": x.hidden.quantiles["0.5"],
                "q3": x.hidden.quantiles["0.75"],
                "whislo": x.hidden.minimum,
                "whishi": x.hidden.maximum,
            }
            for x in _layers(one)
        ]
        colour = look.colour
        axes.bxp(
            stats, positions=range(len(stats)), showfliers=False, patch_artist=True, widths=0.6,
            boxprops={"facecolor": colour, "edgecolor": colour},
            whiskerprops={"color": colour}, capprops={"color": colour},
            medianprops={"color": INK},
        )  # fmt: skip
        for name in ("0.001", "0.999"):
            axes.plot(
                range(len(stats)), [x.hidden.quantiles[name] for x in _layers(one)],
                linestyle="none", marker="_", color=INK, markersize=6,
            )  # fmt: skip
        axes.set_ylim(-1.05 * reach, 1.05 * reach)
        axes.set_title(cut(one.cell))
        axes.set_ylabel("activation")
        _layer_axis(axes)
    yield (
        "boxes",
        "Hidden activations after each decoder layer (the softpick paper's figure 5): quartiles "
        "as boxes, whiskers to the smallest and largest value, dashes at 0.1 % and 99.9 %. "
        "Numbers: layers.csv.",
        figure,
    )


def sinks(cells: Sequence[Analysis]) -> Iterator[Found]:
    """Rate and mean weight, layer by head."""
    if not cells:
        return
    heights = [1.5] * len(cells)
    figure, grid = panels(heights, left=LEFT, named=[], columns=(1, 1), between=0.75, **BARS)
    means = [_of_heads(one, lambda head: head.sinks[0].attention) for one in cells]
    most = max(float(np.nanmax(mean)) for mean in means)
    for one, mean, (left, right) in zip(cells, means, grid, strict=True):
        rate = _of_heads(one, lambda head: 100 * head.sinks[0].rates["0.3"])
        heat(figure, left, rate, most=100.0)
        heat(figure, right, 100 * mean, most=100 * most)
        left.set_title(f"{cut(one.cell)}\nsink rate %", fontsize=7.5, loc="left")
        right.set_title("weight on\nthe first key %", fontsize=7.5, loc="left")
        left.set_ylabel("head")
        right.tick_params(labelleft=False)
        for axes in (left, right):
            axes.set_xlabel("layer")
    yield (
        "sinks",
        "Attention sinks by layer and head: the share of texts on which a head's mean weight on "
        "the first key exceeds 0.3, and that mean weight. Numbers: heads.csv.",
        figure,
    )


def sparsity(cells: Sequence[Analysis], replicates: Replicates) -> Iterator[Found]:
    if not cells:
        return
    looks = series(cells, replicates)
    figure, grid = panels([1.8], left=LEFT, named=names(looks))
    axes = grid[0][0]
    for one, look in zip(cells, looks, strict=True):
        zeros = 100 * _of_heads(one, lambda head: head.zeros)  # [head, layer]
        layers = np.arange(zeros.shape[1])
        axes.fill_between(
            layers, np.nanmin(zeros, 0), np.nanmax(zeros, 0),
            color=look.colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
        axes.plot(layers, np.nanmean(zeros, 0), **look.line)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("zeros (%)")
    _layer_axis(axes)
    legend(figure, axes)
    yield (
        "sparsity",
        "Attention weights of exactly 0 among the pairs that causality allows, by layer: mean over "
        "heads, and the range of the heads. Numbers: heads.csv.",
        figure,
    )


def maps(one: Analysis) -> Iterator[Found]:
    """A row a text, a column a head."""
    found = _measured(one).maps
    if not found:
        return
    texts = list(dict.fromkeys(m.text for m in found))
    heads = list(dict.fromkeys((m.layer, m.head) for m in found))
    figure, grid = panels(
        [1.5] * len(texts), left=LEFT, named=[], columns=[1] * len(heads), between=0.5, **BARS
    )
    for row, text in enumerate(texts):
        for column, head in enumerate(heads):
            own = next(m for m in found if m.text == text and (m.layer, m.head) == head)
            axes = grid[row][column]
            heat(figure, axes, _square(own), most=None, turned=True)
            axes.set_title(f"{text}, layer {head[0]} head {head[1]}", fontsize=7.5, loc="left")
            axes.tick_params(labelleft=column == 0)
            if column == 0:
                axes.set_ylabel("query")
            if row == len(texts) - 1:
                axes.set_xlabel("key")
    yield (
        f"maps-{re.sub('[^A-Za-z0-9._-]+', '-', one.cell)}",
        f"{one.cell}: attention weights of two heads on three kinds of text (as in the softpick "
        "paper's figures 6 and 8 to 19); each map has its own scale. A bright first column is a "
        "sink. Numbers and tokens: maps.csv.",
        figure,
    )


def heat(
    figure: Figure,
    axes: Axes,
    values: np.ndarray,
    *,
    most: float | None,
    turned: bool = False,
    norm: Normalize | None = None,
) -> AxesImage:
    """``values`` [rows, columns] as an image, which stays small in a file of vectors; NaN is left
    blank. ``turned``: the first row at the top. With a bar of its own."""
    limits = {} if norm else {"vmin": 0, "vmax": most}
    image = axes.imshow(
        values, cmap=MAP, aspect="auto", interpolation="nearest", norm=norm,
        origin="upper" if turned else "lower", **limits,
    )  # fmt: skip
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
    bar = figure.colorbar(image, ax=axes, fraction=0.06, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6.5, length=2, pad=1)
    axes.tick_params(labelsize=7)
    return image


def _square(one: AttentionMap) -> np.ndarray:
    size = len(one.rows)
    values = np.full((size, size), np.nan)
    for query, row in enumerate(one.rows):
        values[query, : len(row)] = row
    return values


def _of_heads(one: Analysis, value: Callable) -> np.ndarray:
    """[heads, layers]; NaN where a layer has no such head."""
    layers = _layers(one)
    found = np.full((max(len(layer.heads) for layer in layers), len(layers)), np.nan)
    for column, layer in enumerate(layers):
        for row, head in enumerate(layer.heads):
            found[row, column] = value(head)
    return found


def _measured(one: Analysis) -> Measured:
    assert one.measured is not None
    return one.measured


def _layers(one: Analysis) -> tuple[Layer, ...]:
    return _measured(one).layers


def _layer_axis(axes: Axes) -> None:
    axes.set_xlabel("decoder layer")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
