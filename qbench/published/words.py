"""Do the paper's words agree with its tables? Names of models, and claims about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from qbench.published import Claim, PublishedTable
from qbench.published.finding import Finding

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
