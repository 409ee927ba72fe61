"""Outcomes of several cells on the same documents, as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One metric of one cell, summed by document.

    ``documents`` is sorted and unique; ``values`` and ``weights`` are sums over the document's
    rows, so that a document with several rows is one unit (cluster) of every statistic.
    """

    documents: NDArray
    values: Floats
    weights: Floats

    @classmethod
    def of(cls, document: ArrayLike, value: ArrayLike, weight: ArrayLike) -> Column:
        documents, index = np.unique(np.asarray(document), return_inverse=True)
        return cls(
            documents=documents,
            values=np.bincount(index, np.asarray(value, dtype=float), len(documents)),
            weights=np.bincount(index, np.asarray(weight, dtype=float), len(documents)),
        )

    def only(self, documents: NDArray) -> Column:
        """The same on ``documents``, all of which must be there."""
        index = np.searchsorted(self.documents, documents)
        return Column(documents=documents, values=self.values[index], weights=self.weights[index])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """Columns on the same documents: ``values`` and ``weights`` are [documents, columns]."""

    values: Floats
    weights: Floats
    index: dict[object, int] = field(default_factory=dict)  # column's name → its index

    @classmethod
    def of(cls, columns: dict[object, Column]) -> Panel:
        """Columns on the documents that all of them have."""
        shared = common_documents(list(columns.values()))
        cut = [column.only(shared) for column in columns.values()]
        return cls(
            values=np.stack([column.values for column in cut], axis=1),
            weights=np.stack([column.weights for column in cut], axis=1),
            index={name: index for index, name in enumerate(columns)},
        )

    @property
    def documents(self) -> int:
        return len(self.values)


def common_documents(columns: Sequence[Column]) -> NDArray:
    """Documents that all columns have, sorted."""
    shared = columns[0].documents
    for column in columns[1:]:
        if not np.array_equal(shared, column.documents):
            shared = np.intersect1d(shared, column.documents, assume_unique=True)
    return shared
