"""Text for a terminal: tables, and names with values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

WIDTH = 100  # of a line; what is longer goes on below its column


def pairs(found: Iterable[tuple[str, str]]) -> str:
    known = list(found)
    width = max((len(name) for name, _ in known), default=0)
    lines: list[str] = []
    for name, value in known:
        pieces = list(_wrapped(value, max(20, WIDTH - width - 4))) or [""]
        lines.append(f"  {name.ljust(width)}  {pieces[0]}")
        lines += [f"  {'':{width}}  {piece}" for piece in pieces[1:]]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> Iterator[str]:
    for start in range(0, len(text), width):
        yield text[start : start + width]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    text = tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
