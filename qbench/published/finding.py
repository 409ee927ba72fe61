"""Something in a paper that does not add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qbench.published import PublishedTable

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
