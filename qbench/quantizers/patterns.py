"""Names that settings leave out, and shapes that come out in whole groups. Imports no torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from qbench.errors import QuantizationError


def left_out(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Those of ``names`` that ``patterns`` say: a name, consecutive parts of one between dots
    (``experts``, ``mlp.gate``), or a shell pattern of all of one (``*.o_proj``)."""
    return {n for n in names if any(_matches(n, pattern) for pattern in patterns)}


def require_whole_groups(quantizer: str, layer: str, features: int, what: str, size: int) -> None:
    """Raise QuantizationError where ``features`` are no whole number of groups of ``size``."""
    if features % size:
        fitting = [n for n in (8, 16, 32, 64, 128, 256) if features % n == 0]
        offer = f"choose {' or '.join(map(str, fitting))}"
        if not fitting:
            offer = f"no usual size divides it: say leave_out: [{layer.rpartition('.')[2]}]"
        raise QuantizationError(
            f"{quantizer}: {layer} has {features} {what}, no multiple of group_size {size}; {offer}"
        )


def _matches(name: str, pattern: str) -> bool:
    return f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern)
