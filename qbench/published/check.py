"""Do the published tables add up? Recompute what can be recomputed, compare what is told twice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from itertools import combinations
from typing import Literal

from qbench.published import PublishedTable, tables

Kind = Literal["delta", "rounding", "attainable", "duplicate", "unquantized", "contradiction"]

# Three roundings to 0.01 (two values and their difference) part printed and recomputed Δ by less
# than 0.015, which at two decimals is 0.01.
ROUNDING = Decimal("0.01")
# A 2- or 3-bit model whose every score is this close to the unquantized one was not quantized.
SAME = Decimal("0.20")
LOW_BITS = ("2-bit", "3-bit")
# Documents of the evaluation sets: a mean of right answers can only be a multiple of 1/n.
DOCUMENTS = {"Arc Easy": 2376, "Lambada": 5153, "Piqa": 1838, "Sciq": 1000}
PERPLEXITY_RATIO = Decimal("1.5")  # beyond this two perplexities of one model contradict


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that does not add up. ``grave`` where rounding or another run cannot explain it."""

    kind: Kind
    place: str
    text: str
    grave: bool


def check() -> list[Finding]:
    """All findings on the published tables, grave ones first."""
    scored = [one for one in tables() if one.models]
    found = [finding for one in scored for finding in (*_deltas(one), *_attainable(one))]
    found += [finding for one in scored for finding in _duplicates(one)]
    for quantized in scored:
        for plain in scored:
            alike = quantized.scale == plain.scale and "delta" in plain.columns
            if alike and plain.method == "none" and quantized.method != "none":
                found += _unquantized(quantized, plain)
    for one, other in combinations((t for t in scored if t.method == "none"), 2):
        if one.scale == other.scale:
            found += _contradictions(one, other)
    return sorted(found, key=lambda finding: not finding.grave)


def summary() -> str:
    """What was checked and what was found, one line a finding."""
    rows = [row for one in tables() for row in one.rows if "delta" in row]
    findings = check()
    lines = [
        f"{'GRAVE' if finding.grave else 'note '}  {finding.place}: {finding.text}"
        for finding in findings
    ]
    off = sum(finding.kind in ("delta", "rounding") for finding in findings)
    grave = sum(finding.grave for finding in findings)
    lines.append(
        f"{len(rows)} Δ recomputed: {len(rows) - off} equal the difference of the printed "
        f"scores, {off} do not to the last digit. {grave} grave findings of {len(findings)}."
    )
    return "\n".join(lines)


def doubts(places: Collection[str]) -> list[str]:
    """What is gravely wrong with the tables at ``places`` (such as "Table 13"), a line each."""
    return [
        f"{finding.place}: {finding.text}"
        for finding in check()
        if finding.grave and finding.place.split(",")[0] in places
    ]


def _deltas(one: PublishedTable) -> Iterator[Finding]:
    for row in one.rows:
        if "delta" not in row:
            continue
        again = Decimal(row["softpick"]) - Decimal(row["softmax"])
        gap = abs(again - Decimal(row["delta"]))
        if gap:
            grave = gap > ROUNDING
            yield Finding(
                kind="delta" if grave else "rounding",
                place=_place(one, row),
                text=f"Δ is printed as {row['delta']}, the printed scores give {again:+}"
                + ("" if grave else " (rounding explains it)"),
                grave=grave,
            )


def _attainable(one: PublishedTable) -> Iterator[Finding]:
    for row in one.rows:
        documents = DOCUMENTS.get(row["task"])
        if documents is None or not row["metric"].startswith("Acc"):
            continue
        for model in one.models:
            value = Decimal(row[model])
            nearest = round(value * documents / 100)
            attainable = Decimal(100 * nearest) / documents
            if attainable.quantize(value, ROUND_HALF_UP) != value:
                yield Finding(
                    kind="attainable",
                    place=_place(one, row),
                    text=f"{model}'s {value} is no share of {documents} documents "
                    f"(nearest {attainable:.4f})",
                    grave=abs(attainable - value) > ROUNDING,
                )


def _duplicates(one: PublishedTable) -> Iterator[Finding]:
    by_precision: dict[str, dict[tuple[str, str], list[str]]] = {}
    for row in one.rows:
        cells = [row[model] for model in one.models]
        by_precision.setdefault(row.get("quantization", ""), {})[row["task"], row["metric"]] = cells
    for first, second in combinations(by_precision, 2):
        if by_precision[first] == by_precision[second]:
            yield Finding(
                kind="duplicate",
                place=one.place,
                text=f"all {len(by_precision[first])} rows of {first} equal those of {second}, for "
                f"{' and '.join(one.models)}: two precisions never agree to the last digit",
                grave=True,
            )


def _unquantized(quantized: PublishedTable, plain: PublishedTable) -> Iterator[Finding]:
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
                place=quantized.place,
                text=f"all {len(gaps)} scores of {bits} are within {max(gaps)} of the unquantized "
                f"ones in {plain.place}: as if nothing had been quantized",
                grave=True,
            )


def _contradictions(one: PublishedTable, other: PublishedTable) -> Iterator[Finding]:
    rows = {(row["task"], row["metric"]): row for row in other.rows}
    for row in one.rows:
        for model in set(one.models) & set(other.models):
            a, b = Decimal(row[model]), Decimal(rows[row["task"], row["metric"]][model])
            if a == b:
                continue
            grave = "Perplexity" in row["metric"] and max(a, b) / min(a, b) > PERPLEXITY_RATIO
            yield Finding(
                kind="contradiction",
                place=_place(one, row),
                text=f"{model} has {a} here and {b} in {other.place}"
                + ("" if grave else f" (apart by {abs(a - b)}: another run or version)"),
                grave=grave,
            )


def _place(one: PublishedTable, row: dict[str, str]) -> str:
    parts = [one.place, row["task"], row["metric"], row.get("quantization", "")]
    return ", ".join(part for part in parts if part)
