"""Figures of analyses: boxes, largest values, sinks, sparsity, maps, by position and layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qbench.passkey import depth, task_length
from qbench.records import Analysis, AttentionMap, Layer, Measured, Record, Sensitivity, Stretch
from qbench.report.figures import Found
from qbench.report.style import DASHES, INK, MARKERS, SERIES, cut, legend, panels
from qbench.store import Store
from qbench.tables.analyses import Pruned, Why, correlation, pairs, pruned_alone
from qbench.tables.table import at_chance
from qbench.text import MINUS

Replicates = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One cell's: its place among the looks, and what the legend calls it."""

    index: int
    label: str

    @property
    def colour(self) -> str:
        return SERIES[self.index % len(SERIES)]

    @property
    def marker(self) -> str:
        return MARKERS[self.index % len(MARKERS)]

    @property
    def dash(self) -> str:
        return DASHES[self.index % len(DASHES)]

    @property
    def line(self) -> dict[str, str]:
        """As matplotlib takes it."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dash,
            "label": self.label,
        }


def series(cells: Sequence[Analysis | Sensitivity], replicates: Replicates) -> list[Series]:
    """Of each cell, in order."""
    kinds = {member: name for name, members in replicates.items() for member in members}
    labels = [f"{kinds.get(one.checkpoint, one.checkpoint)}/{one.quantizer}" for one in cells]
    places = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    return [Series(index=places[label], label=label) for label in labels]


def names(found: Sequence[Series]) -> list[str]:
    """What the legend says, each once."""
    return list(dict.fromkeys(one.label for one in found))


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


DEPTHS = 10  # rows of the passkey figure
LEAST_KL = 1e-9  # nats: what stands for none on a logarithmic scale
Row = dict[str, object]


def figures_along_figures(why: Why, keys: Sequence[Row]) -> list[Callable[[], Iterator[Found]]]:
    """What draws those that there is something for; ``keys`` as :func:`passkey_rows` has them."""
    makers: list[Callable[[], Iterator[Found]]] = []
    along = [one for one in why.long or why.cells if one.measured and one.measured.stretches]
    if along:
        makers.append(lambda: stretches(along, why.replicates))
    labels = list(dict.fromkeys((one.quantizer, one.unit) for one in why.sensitivities))
    for label, unit in labels:
        own = [s for s in why.sensitivities if (s.quantizer, s.unit) == (label, unit)]
        makers.append(lambda own=own, label=label: sensitivity(own, label))
        makers.append(lambda own=own, label=label: scatter(own, label, why))
    if cut_out := pruned_alone(why.records):
        makers.append(lambda: pruning(cut_out))
    if keys:
        makers.append(lambda: passkey(keys))
    return makers


def stretches(cells: Sequence[Analysis], replicates: Replicates) -> Iterator[Found]:
    looks = series(cells, replicates)
    figure, grid = panels([1.5, 1.2, 1.2], left=LEFT, named=names(looks), between=0.6)
    for one, look in zip(cells, looks, strict=True):
        assert one.measured is not None
        parts = one.measured.stretches
        told = [part for part in parts if part.loss is not None]
        centres = _centres(told)
        losses = np.array([part.loss for part in told])
        errors = np.array([1.96 * (part.loss_stderr or 0.0) for part in told])
        grid[0][0].fill_between(
            centres, losses - errors, losses + errors, color=look.colour, alpha=0.2, linewidth=0
        )
        _line(grid[0][0], centres, losses, look)
        for row, name in ((1, "mass"), (2, "largest")):
            _line(grid[row][0], _centres(parts), [getattr(p, name) for p in parts], look)
    titles = ("loss (nats a token)", "Σ weights of a query", "largest weight of a query")
    for axes, title in zip(grid[:, 0], titles, strict=True):
        axes.set_title(title)
    for axes in grid[1:, 0]:
        axes.set_ylim(bottom=0)
    grid[-1][0].set_xlabel("position in the text (tokens)")
    legend(figure, grid[0][0])
    yield (
        "along-the-text",
        "Along the text, in stretches of 128 positions (the softpick paper's section 7.7): loss "
        "with 95 % intervals over texts, the sum of a query's weights and its largest weight, "
        "means over heads. Numbers: stretches.csv.",
        figure,
    )


def sensitivity(found: Sequence[Sensitivity], label: str) -> Iterator[Found]:
    """KL by layer, and by kind of linear layer where these were taken one by one."""
    tables = [_by_layer(one) for one in found]
    kinds = list(dict.fromkeys(kind for table in tables for kind, _ in table))
    layers = 1 + max((layer for table in tables for _, layer in table), default=0)
    values = [np.full((len(kinds), layers), np.nan) for _ in tables]
    for grid, table in zip(values, tables, strict=True):
        for (kind, layer), kl in table.items():
            grid[kinds.index(kind), layer] = max(kl, LEAST_KL)
    known = np.concatenate([grid[~np.isnan(grid)] for grid in values])
    if not len(known):
        return
    norm = LogNorm(float(known.min()), max(float(known.max()), 1.01 * float(known.min())))
    room = 0.3 + 0.07 * max(map(len, kinds))
    heights = [0.35 + 0.17 * len(kinds)] * len(found)
    figure, axes = panels(heights, left=room, named=[], between=0.7, right=BARS["right"])
    for one, grid, (panel,) in zip(found, values, axes, strict=True):
        image = heat(figure, panel, grid, most=None, turned=True, norm=norm)
        assert image.colorbar is not None
        few_powers(image.colorbar.ax.yaxis)
        panel.set_yticks(range(len(kinds)), kinds)
        panel.set_title(cut(one.cell))
        panel.set_xlabel("decoder layer")
    yield (
        f"sensitivity-{_plain(label)}",
        f"{label}: KL divergence (nats a token) when one part of the model is quantized and the "
        "rest is not; logarithmic, one scale for all. Numbers: sensitivity.csv.",
        figure,
    )


def scatter(found: Sequence[Sensitivity], label: str, why: Why) -> Iterator[Found]:
    known = [(one, own) for one in found if (own := pairs(one, why.cells))]
    if not known:
        return
    looks = series([one for one, _ in known], why.replicates)
    figure, grid = panels([2.2], left=0.9, named=names(looks))
    axes, told = grid[0][0], []
    for (one, own), look in zip(known, looks, strict=True):
        axes.plot(
            [pair.outliers for pair in own], [max(pair.kl, LEAST_KL) for pair in own],
            linestyle="none", marker=look.marker, markersize=4, color=look.colour, alpha=0.8,
            label=look.label,
        )  # fmt: skip
        if (rho := correlation(own)) is not None:
            told.append(f"{one.cell}: ρ = {_signed(rho.value)} ({_signed(rho.low)} to "
                        f"{_signed(rho.high)})")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    few_powers(axes.xaxis)
    few_powers(axes.yaxis)
    axes.set_xlabel("largest |x| / rms of what it receives")
    axes.set_ylabel("KL, quantized alone")
    legend(figure, axes)
    yield (
        f"outliers-{_plain(label)}",
        f"{label}: outliers in the inputs of each part of the model against the KL divergence when "
        f"that part is quantized alone. Spearman's rank correlation, 95 % interval: "
        f"{'; '.join(told) or 'too few parts'}. Numbers: inputs.csv and "
        "sensitivity.csv.",
        figure,
    )


def pruning(found: Sequence[Pruned]) -> Iterator[Found]:
    """How much of a model can go before its predictions move."""
    checkpoints = list(dict.fromkeys(one.record.checkpoint for one in found))
    figure, grid = panels([2.0], left=0.9, named=checkpoints)
    axes = grid[0][0]
    lowest = min((one.kl for one in found if one.kl > 0), default=LEAST_KL) / 10
    for index, name in enumerate(checkpoints):
        own = [one for one in found if one.record.checkpoint == name]
        axes.plot(
            [100 * one.share for one in own], [max(one.kl, lowest) for one in own],
            color=SERIES[index % len(SERIES)], linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)], label=name,
        )  # fmt: skip
    axes.set_yscale("log")
    few_powers(axes.yaxis)
    axes.set_xlim(left=0)
    axes.set_xlabel("heads cut out (% of all)")
    axes.set_ylabel("KL (nats a token)")
    legend(figure, axes)
    yield (
        "pruning",
        "Heads cut out, those first that give least on the calibration text (the softpick paper's "
        "section 7.4): KL divergence from the whole model over all scored tokens. A cell whose "
        "logits do not change stands at the bottom. Numbers: pruned.csv.",
        figure,
    )


def passkey_rows(store: Store, records: Sequence[Record]) -> list[Row]:
    """Accuracy of each cell by length and depth, of ``DEPTHS`` equal parts of a prompt. Raises
    ResultsError where a table is damaged."""
    rows: list[Row] = []
    for record in records:
        if not any(task_length(score.task) for score in record.scores):
            continue
        outcomes = store.outcomes(record)
        own = outcomes[outcomes["task"].map(task_length).notna()]
        parts = own["document"].map(lambda document: int(depth(document) * DEPTHS))
        for (task, metric, part), values in own.groupby(["task", "metric", parts], sort=False)[
            "value"
        ]:
            rows.append(
                {
                    "checkpoint": record.checkpoint,
                    "quantizer": record.quantizer,
                    "length": task_length(task),
                    "depth": part / DEPTHS,
                    "metric": metric,
                    "value": float(values.mean()),
                    "documents": len(values),
                    "key": record.key,
                }
            )
    return rows


def passkey(rows: Sequence[Row]) -> Iterator[Found]:
    """Length by depth, a panel a cell."""
    exact = [row for row in rows if row["metric"] == "exact_match"]
    cells = list(dict.fromkeys(f"{row['checkpoint']}/{row['quantizer']}" for row in exact))
    lengths = sorted({int(str(row["length"])) for row in exact})
    abreast = min(2, len(cells))
    figure, grid = panels(
        [1.3] * -(-len(cells) // abreast), left=LEFT, named=[], columns=[1] * abreast, between=0.75,
        **BARS,
    )  # fmt: skip
    for axes in grid.flat[len(cells) :]:
        axes.set_axis_off()
    for cell, axes in zip(cells, grid.flat, strict=False):
        values = np.full((DEPTHS, len(lengths)), np.nan)
        for row in exact:
            if f"{row['checkpoint']}/{row['quantizer']}" == cell:
                part = round(float(str(row["depth"])) * DEPTHS)
                place = lengths.index(int(str(row["length"])))
                values[part, place] = 100 * float(str(row["value"]))
        heat(figure, axes, values, most=100.0, turned=True)
        for place, length in enumerate(lengths):
            if _guessed(exact, cell, length):
                axes.text(
                    place, (DEPTHS - 1) / 2, "chance", rotation=90, color="white", fontsize=7,
                    ha="center", va="center",
                )  # fmt: skip
        axes.set_xticks(range(len(lengths)), list(map(str, lengths)), rotation=30)
        axes.set_yticks([0, DEPTHS - 1], ["first", "last"])
        axes.set_title(cut(cell), fontsize=7.5, loc="left")
    for row in grid:
        row[0].set_ylabel("tenth")
        for axes in row[1:]:
            axes.tick_params(labelleft=False)
    for axes in grid[-1]:
        axes.set_xlabel("tokens of the prompt", fontsize=8)
    yield (
        "passkey",
        "Passkey retrieval: keys given back (%) by length of the prompt and by the tenth of it in "
        "which the key stands; chance: no more than guessing reaches. Numbers: passkey.csv.",
        figure,
    )


def _guessed(rows: Sequence[Row], cell: str, length: int) -> bool:
    """Whether a cell's score at a length, all depths together, is one that guessing reaches."""
    own = [
        (float(str(row["value"])), int(str(row["documents"])))
        for row in rows
        if f"{row['checkpoint']}/{row['quantizer']}" == cell and row["length"] == length
    ]
    documents = sum(count for _, count in own)
    right = sum(value * count for value, count in own)
    return bool(documents) and at_chance("exact_match", right / documents, documents)


def _by_layer(one: Sensitivity) -> dict[tuple[str, int], float]:
    """(kind, layer) → KL; a whole decoder layer's kind is ``layer``."""
    found = {}
    for unit in one.units:
        if unit.layer is not None and unit.kl.value is not None:
            kind = "layer" if one.unit == "block" else unit.name.rpartition(".")[2]
            kl = found.get((kind, unit.layer), 0.0)  # experts of one kind: the most of them
            found[kind, unit.layer] = max(kl, unit.kl.value)
    return found


def _centres(parts: Sequence[Stretch]) -> list[float]:
    return [(part.first + part.last) / 2 for part in parts]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float] | np.ndarray, look: Series) -> None:
    axes.plot(
        x, y, color=look.colour, linestyle=look.dash, label=look.label, markersize=3.5,
        marker=look.marker if len(x) <= 16 else None, linewidth=1.3,
    )  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", MINUS)


def _plain(label: str) -> str:
    return re.sub("[^A-Za-z0-9._-]+", "-", label)
