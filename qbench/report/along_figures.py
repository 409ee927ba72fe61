"""Figures along the text, a layer at a time, and of passkey retrieval."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from qbench.passkey import depth, task_length
from qbench.records import Analysis, Record, Sensitivity, Stretch
from qbench.report.costs import Found
from qbench.report.style import DASHES, MARKERS, SERIES, cut, legend, panels
from qbench.report.why_figures import BARS, LEFT, few_powers, heat
from qbench.report.why_series import Replicates, Series, names, series
from qbench.store import Store
from qbench.tables.along import correlation, pairs
from qbench.tables.analyses import Why
from qbench.tables.chance import at_chance
from qbench.tables.pruned import Pruned, pruned_alone
from qbench.text import MINUS

DEPTHS = 10  # rows of the passkey figure
LEAST_KL = 1e-9  # nats: what stands for none on a logarithmic scale
Row = dict[str, object]


def figures(why: Why, keys: Sequence[Row]) -> list[Callable[[], Iterator[Found]]]:
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
