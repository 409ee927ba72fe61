"""Something in a paper that does not add up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from itertools import combinations
from typing import Literal

from qbench.published import Claim, PublishedTable, claims, tables

Kind = Literal[
    "delta", "rounding", "attainable", "step", "duplicate", "unquantized", "contradiction",
    "same scores", "name", "claim",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """``grave`` where rounding or another run cannot explain it."""

    kind: Kind
    where: str
    text: str
    grave: bool


def where_in(one: PublishedTable, row: Mapping[str, str]) -> str:
    parts = [one.source, row["task"], row["metric"], row.get("quantization", "")]
    return ", ".join(part for part in parts if part)


SHARED = 2  # names that two tables must share to be taken for ones of the same models


def names(one: PublishedTable, other: PublishedTable) -> Iterator[Finding]:
    """Two tables of the same models, one of which is called otherwise in each."""
    ours, theirs = _models(one), _models(other)
    shared = ours.keys() & theirs.keys()
    only, elsewhere = (list(a.keys() - shared) for a in (ours, theirs))
    if len(shared) > SHARED and len(only) == len(elsewhere) == 1:
        yield Finding(
            kind="name",
            where=f"{one.source} and {other.source}",
            text=f"the model beside {', '.join(sorted(shared))} is called {ours[only[0]]} in "
            f"{one.source} and {theirs[elsewhere[0]]} in {other.source}",
            grave=False,
        )


def claim(one: Claim, tables: Sequence[PublishedTable]) -> Iterator[Finding]:
    """A claim that one model is better, against every row of the tables that it is about."""
    rows = [row for table in tables if table.name in one.tables for row in table.rows]
    worse = [row for row in rows if _gain(row, one) < 0]
    if worse:
        equal = sum(_gain(row, one) == 0 for row in rows)
        yield Finding(
            kind="claim",
            where=one.source,
            text=f"“{one.text}”: in {one.of} {one.better} is worse than {one.than} in "
            f"{len(worse)} of {len(rows)} rows" + (f" and equal in {equal}" if equal else ""),
            grave=True,
        )


def _models(one: PublishedTable) -> dict[str, str]:
    """Names in small letters → as printed: columns of a table of scores, rows of others."""
    printed = one.models or [row["model"] for row in one.rows if "model" in row]
    return {name.lower(): name for name in printed}


def _gain(row: Mapping[str, str], one: Claim) -> Decimal:
    gap = Decimal(row[one.better]) - Decimal(row[one.than])
    return gap if row["direction"] == "up" else -gap


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


def check() -> list[Finding]:
    """All findings on the published tables and claims, grave ones first."""
    every = tables()
    scored = [one for one in every if one.models]
    found = [finding for one in scored for finding in (*deltas(one), *attainable(one))]
    found += [finding for one in every for finding in steps(one)]
    found += [finding for one in scored for finding in (*duplicates(one), *same_scores(one))]
    for quantized in scored:
        for plain in scored:
            alike = quantized.scale == plain.scale and "delta" in plain.columns
            if alike and plain.method == "none" and quantized.method != "none":
                found += unquantized(quantized, plain)
    for one, other in combinations((t for t in scored if t.method == "none"), 2):
        if one.scale == other.scale:
            found += contradictions(one, other)
    for one, other in combinations(every, 2):
        found += names(one, other)
    found += [finding for one in claims() for finding in claim(one, every)]
    return sorted(found, key=lambda finding: not finding.grave)


def doubts(sources: Collection[str]) -> list[str]:
    """What is gravely wrong with the tables at ``sources`` (such as "Table 13"), a line each."""
    return [
        f"{finding.where}: {finding.text}"
        for finding in check()
        if finding.grave and finding.where.split(",")[0] in sources
    ]


def summary() -> str:
    """What was checked and what was found, one line a finding."""
    rows = [row for one in tables() for row in one.rows if "delta" in row]
    findings = check()
    lines = [
        f"{'GRAVE' if finding.grave else 'note '}  {finding.where}: {finding.text}"
        for finding in findings
    ]
    off = sum(finding.kind in ("delta", "rounding") for finding in findings)
    grave = sum(finding.grave for finding in findings)
    lines.append(
        f"{len(rows)} Δ recomputed: {len(rows) - off} equal the difference of the printed "
        f"scores, {off} do not to the last digit. {grave} grave findings of {len(findings)}."
    )
    return "\n".join(lines)
