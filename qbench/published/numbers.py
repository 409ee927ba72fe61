"""Can a printed number be what it is said to be? Recomputed from what stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal

from qbench.published import PublishedTable
from qbench.published.finding import Finding, where_in

# Three roundings to 0.01 (two values and their difference) part printed and recomputed Δ by less
# than 0.015, which at two decimals is 0.01.
ROUNDING = Decimal("0.01")
# Documents of the evaluation sets: a mean of right answers can only be a multiple of 1/n.
DOCUMENTS = {"Arc Easy": 2376, "Lambada": 5153, "Piqa": 1838, "Sciq": 1000}
STEPS = tuple(map(Decimal, ("5", "2", "1", "0.5", "0.2")))  # of rates from few trials, per cent
FEW = 3  # rates off the step that the others keep


def deltas(one: PublishedTable) -> Iterator[Finding]:
    """Δ that are not the difference of the printed scores."""
    for row in one.rows:
        if "delta" not in row:
            continue
        again = Decimal(row["softpick"]) - Decimal(row["softmax"])
        gap = abs(again - Decimal(row["delta"]))
        if gap:
            grave = gap > ROUNDING
            yield Finding(
                kind="delta" if grave else "rounding",
                where=where_in(one, row),
                text=f"Δ is printed as {row['delta']}, the printed scores give {again:+}"
                + ("" if grave else " (rounding explains it)"),
                grave=grave,
            )


def attainable(one: PublishedTable) -> Iterator[Finding]:
    """Accuracies that are no share of the evaluation set's documents."""
    for row in one.rows:
        documents = DOCUMENTS.get(row.get("task", ""))
        if documents is None or not row["metric"].startswith("Acc"):
            continue
        for model in one.models:
            value = Decimal(row[model])
            nearest = round(value * documents / 100)
            exact = Decimal(100 * nearest) / documents
            if exact.quantize(value, ROUND_HALF_UP) != value:
                yield Finding(
                    kind="attainable",
                    where=where_in(one, row),
                    text=f"{model}'s {value} is no share of {documents} documents "
                    f"(nearest {exact:.4f})",
                    grave=abs(exact - value) > ROUNDING,
                )


def steps(one: PublishedTable) -> Iterator[Finding]:
    """Rates of a table of models by rows that leave the step that all its others keep."""
    if one.columns[0] != "model":
        return
    cells = [(row["model"], column, Decimal(row[column]))
             for row in one.rows for column in one.columns[1:]]  # fmt: skip
    for step in STEPS:
        off = [cell for cell in cells if cell[2] % step]
        if not off:
            return
        if len(off) > FEW or len(off) * 5 > len(cells):
            continue
        for model, column, value in off:
            yield Finding(
                kind="step",
                where=f"{one.source}, {model}, {column}",
                text=f"{value} where the other {len(cells) - len(off)} rates are multiples of "
                f"{step}, as of {100 / step:.0f} trials",
                grave=True,
            )
        return
