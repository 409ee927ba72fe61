"""What went wrong with several things alike, said once."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOG = re.compile(r" \(the traceback is in [^()]*\)$")  # as qbench.cell writes it
NAMES = 8  # that are written out; of more the number is


def reason_alone(reason: str) -> str:
    """Without the file that has the traceback, which every failed cell has of its own."""
    return LOG.sub("", reason)


def together(lines: Iterable[str]) -> list[str]:
    """``name: reason`` lines with those of one reason as one, in the order in which they began."""
    names: dict[str, list[str]] = {}
    said: dict[str, str] = {}
    for line in lines:
        name, _, reason = line.partition(": ")
        alone = reason_alone(reason)
        names.setdefault(alone, []).append(name)
        said.setdefault(alone, reason)
    return [f"{some(of)}: {said[one]}" if one else some(of) for one, of in names.items()]


def some(names: list[str]) -> str:
    """The first few names, and how many there are beside."""
    rest = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {rest} more" if rest > 0 else "")
