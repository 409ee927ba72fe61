"""Do the published tables add up? Recompute what can be recomputed, compare what is told twice."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

from qbench.published import claims, tables
from qbench.published.finding import Finding
from qbench.published.numbers import attainable, deltas, steps
from qbench.published.repeats import contradictions, duplicates, same_scores, unquantized
from qbench.published.words import claim, names


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
