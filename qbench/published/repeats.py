"""What is told twice: the same numbers where they should differ, others where they should not."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations

from qbench.published import PublishedTable
from qbench.published.finding import Finding, where_in

# A 2- or 3-bit model whose every score is this close to the unquantized one was not quantized.
SAME = Decimal("0.20")
LOW_BITS = ("2-bit", "3-bit")
PERPLEXITY_RATIO = Decimal("1.5")  # beyond this two perplexities of one model contradict


def duplicates(one: PublishedTable) -> Iterator[Finding]:
    """Precisions of one table whose scores are all the same."""
    by_precision: dict[str, dict[tuple[str, str], list[str]]] = {}
    for row in one.rows:
        cells = [row[model] for model in one.models]
        by_precision.setdefault(row.get("quantization", ""), {})[row["task"], row["metric"]] = cells
    for first, second in combinations(by_precision, 2):
        if by_precision[first] == by_precision[second]:
            yield Finding(
                kind="duplicate",
                where=one.source,
                text=f"all {len(by_precision[first])} rows of {first} equal those of {second}, for "
                f"{' and '.join(one.models)}: two precisions never agree to the last digit",
                grave=True,
            )


def same_scores(one: PublishedTable) -> Iterator[Finding]:
    """Two models with the same scores in every metric of a task, where it has several."""
    tasks: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in one.rows:
        tasks.setdefault((row["task"], row.get("quantization", "")), []).append(row)
    for (task, precision), rows in tasks.items():
        for first, second in combinations(one.models, 2):
            if len(rows) > 1 and all(row[first] == row[second] for row in rows):
                values = " and ".join(f"{row[first]} {row['metric']}" for row in rows)
                yield Finding(
                    kind="same scores",
                    where=", ".join(part for part in (one.source, task, precision) if part),
                    text=f"{first} and {second} are identical, {values}: two models do not agree "
                    "in every metric to the last digit",
                    grave=True,
                )


def unquantized(quantized: PublishedTable, plain: PublishedTable) -> Iterator[Finding]:
    """Low precisions whose scores are those of the unquantized models."""
    reference = {(row["task"], row["metric"]): row for row in plain.rows}
    for bits in LOW_BITS:
        rows = [row for row in quantized.rows if row.get("quantization") == bits]
        gaps = [
            abs(Decimal(row[model]) - Decimal(reference[row["task"], row["metric"]][model]))
            for row in rows
            for model in ("softmax", "softpick")
        ]
        if gaps and max(gaps) <= SAME:
            yield Finding(
                kind="unquantized",
                where=quantized.source,
                text=f"all {len(gaps)} scores of {bits} are within {max(gaps)} of the unquantized "
                f"ones in {plain.source}: as if nothing had been quantized",
                grave=True,
            )


def contradictions(one: PublishedTable, other: PublishedTable) -> Iterator[Finding]:
    """Scores of the same unquantized model that differ between two tables."""
    rows = {(row["task"], row["metric"]): row for row in other.rows}
    for row in one.rows:
        for model in one.models:
            if model not in other.models:
                continue
            a, b = Decimal(row[model]), Decimal(rows[row["task"], row["metric"]][model])
            if a == b:
                continue
            grave = "Perplexity" in row["metric"] and max(a, b) / min(a, b) > PERPLEXITY_RATIO
            yield Finding(
                kind="contradiction",
                where=where_in(one, row),
                text=f"{model} has {a} here and {b} in {other.source}"
                + ("" if grave else f" (apart by {abs(a - b)}: another run or version)"),
                grave=grave,
            )
