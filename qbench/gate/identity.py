"""Are the results of what the baseline is of? Other weights are refused, the rest is named."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from qbench.comparison.changes import CellResults
from qbench.comparison.explain import Difference, differences
from qbench.errors import ResultsError

# Parts of a cell's key that must be the baseline's, unless the user says otherwise.
ACROSS = {
    "weights": "are of other weights than the baseline",
    "normalizer": "are of another attention normalizer than the baseline",
}
LEFT_OUT = ("damage against",)  # a key, which differs wherever anything does
SHORT = 12  # digits of a digest that are shown


def require_same(
    old: Mapping[str, CellResults],
    new: Mapping[str, CellResults],
    *,
    across: Collection[str] = (),
) -> list[str]:
    """Notes on every other part of the keys that differs, one a part.

    Raises ResultsError for other weights or another normalizer, unless ``across`` names it.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    cells = [cell for cell in old if cell in new]
    for cell in cells:
        for one in differences(old[cell].key_parts, new[cell].key_parts):
            part = one.part.split(".")[0]
            if part in LEFT_OUT:
                continue
            if part in ACROSS and part not in across:
                raise ResultsError(
                    f"{cell}: these results {ACROSS[part]} ({_told(one)}); check results of the "
                    f"same checkpoint, or say --across {part} if this is meant"
                )
            found.setdefault((one.part, one.a, one.b), []).append(cell)
    return [
        f"{part}: {_short(a)} → {_short(b)} in {_which(where, len(cells))}"
        for (part, a, b), where in found.items()
    ]


def _told(one: Difference) -> str:
    return f"{_short(one.a)} → {_short(one.b)}"


def _short(text: str) -> str:
    digest = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return f"{text[:SHORT]}…" if digest else text


def _which(cells: Sequence[str], many: int) -> str:
    if len(cells) == many:
        return f"all {many} cells" if many > 1 else cells[0]
    shown = ", ".join(cells[:3])
    return shown if len(cells) <= 3 else f"{shown} and {len(cells) - 3} more cells"
