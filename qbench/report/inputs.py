"""Quantized activations, and what a token's logits depend on, as the audit measured them."""

from __future__ import annotations

from collections.abc import Iterator

from qbench.comparison.lines import Comparison
from qbench.records import Leak
from qbench.report.costs import sound
from qbench.report.table import Cell, DataTable, build, plain
from qbench.text import NO_VALUE


def inputs(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Format", "Products", "Levels", "Clipped", "Error", "Largest in a layer",
            "Weight error", "Left out"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        found = record.audit.activations if record.audit else None
        part = record.precision.activations
        if record.audit is None or found is None or part is None:
            continue
        worst = max(found.modules, key=lambda one: one.error, default=None)
        weights = record.audit.weight_error if record.precision.weights else None
        rows.append(
            [
                Cell(text=record.cell),
                Cell(text=part.scheme),
                Cell(text={None: NO_VALUE, True: "simulated", False: "real"}[part.simulated]),
                plain(found.levels, "{:d}"),
                plain(found.clipped, "{:.3%}"),
                plain(found.error, "{:.4f}"),
                Cell(text=f"{worst.error:.4f}", sort=worst.error, title=worst.name)
                if worst
                else Cell(text=NO_VALUE),
                plain(weights, "{:.4f}"),
                Cell(text=", ".join(found.left_out)),
            ]
        )
    if rows:
        caption = (
            "What products with weight matrices took in on a probe text, measured where they take "
            "it. Error: ‖x′ − x‖ / ‖x‖, beside the weights' ‖W′ − W‖ / ‖W‖. Levels: most distinct "
            "values under one scale. Clipped: share of values beyond what their scale allows."
        )
        yield build("activations", "audit", "Activations", caption, head, rows, keys=1)


def independence(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Moved by the last token", "Rounding", "Moved by batch-mates", "Rounding of it",
            "Declared"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        found = record.audit
        if found is None or found.causality is None or found.batch_mates is None:
            continue
        future, mates = found.causality, found.batch_mates
        declared = [
            word
            for word, leak in (("sees the future", future), ("mixes batches", mates))
            if leak.declared
        ]
        rows.append(
            [
                Cell(text=record.cell),
                *_leak(future),
                *_leak(mates),
                Cell(text=", ".join(declared)),
            ]
        )
    if rows:
        caption = (
            "Largest change of a logit: of earlier tokens when the last token changed, and of one "
            "row when the others of its batch changed. More than rounding fails a cell, unless its "
            "settings declare it, as one scale for a whole batch must."
        )
        title = "What a token's logits depend on"
        yield build("independence", "audit", title, caption, head, rows, keys=1)


def _leak(leak: Leak) -> tuple[Cell, Cell]:
    return plain(leak.moved, "{:.3g}"), plain(leak.tolerance, "{:.2g}")
