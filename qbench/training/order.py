"""Which sequences a step takes, in an order that the seed alone decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Token ids cut into rows of ``context`` + 1: every token but the first is predicted.

    Rows follow one another without a gap; without ``bos`` the last token of one is the first of
    the next. With it each row begins with that id instead.
    """

    tokens: NDArray[np.unsignedinteger]
    context: int
    bos: int | None

    def __len__(self) -> int:
        usable = len(self.tokens) - (self.bos is None)
        return max(0, usable // self.context)

    def row(self, index: int) -> NDArray[np.int64]:
        """[context + 1]."""
        start = index * self.context
        if self.bos is None:
            return self.tokens[start : start + self.context + 1].astype(np.int64)
        row = np.empty(self.context + 1, np.int64)
        row[0] = self.bos
        row[1:] = self.tokens[start : start + self.context]
        return row

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """[len(indices), context + 1]."""
        return np.stack([self.row(int(index)) for index in indices])


def drawn(step: int, *, rows: int, of: int, seed: int) -> NDArray[np.int64]:
    """Indices [rows] of the sequences of ``step``, counted from 0, out of ``of``.

    Epoch after epoch, each in an order of its own: a permutation by NumPy's PCG64 seeded with
    (seed, epoch). Any step's can be had without those before it.
    """
    positions = np.arange(step * rows, (step + 1) * rows)
    epochs = positions // of
    found = np.empty(rows, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permutation(of, seed, int(epoch))[positions[here] % of]
    return found


_last: dict[tuple[int, int, int], NDArray[np.int64]] = {}


def permutation(of: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Kept for the last two epochs asked for: a step may lie in both."""
    key = (of, seed, epoch)
    if key not in _last:
        while len(_last) > 1:
            del _last[next(iter(_last))]
        _last[key] = np.random.default_rng([seed, epoch]).permutation(of)
    return _last[key]
