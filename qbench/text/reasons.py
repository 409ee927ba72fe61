"""What went wrong with several things alike, said once."""

from __future__ import annotations

from collections.abc import Iterable

NAMES = 8  # that are written out; of more the number is


def together(lines: Iterable[str]) -> list[str]:
    """``name: reason`` lines with those of one reason as one, in the order in which they began."""
    names: dict[str, list[str]] = {}
    for line in lines:
        name, _, reason = line.partition(": ")
        names.setdefault(reason, []).append(name)
    return [f"{some(of)}: {reason}" if reason else some(of) for reason, of in names.items()]


def some(names: list[str]) -> str:
    """The first few names, and how many there are beside."""
    rest = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {rest} more" if rest > 0 else "")
