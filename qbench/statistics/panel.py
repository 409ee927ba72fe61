"""Outcomes of several cells on the same documents, and contrasts of their scores.

A score is a function of Σ values / Σ weights: that ratio itself for accuracies, exp(−ratio) for
perplexities. Perplexities are compared by their logarithm, −ratio, which is linear: differences
of it are logarithms of ratios of perplexities. So is KL divergence: its contrasts are of ln(mean).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qbench.metrics import KL_MEAN, LOG_MEAN, LOG_SCALE

Floats = NDArray[np.float64]
PAIRED = ("f1", "matthews_corrcoef")  # lm-eval's names: metrics of all documents at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Hold one metric of one cell, summed by document.

    ``documents`` is sorted and unique; ``values`` and ``weights`` are sums over the document's
    rows, so that a document with several rows is one unit (cluster) of every statistic.
    """

    documents: NDArray
    values: Floats
    weights: Floats

    @classmethod
    def of(cls, document: ArrayLike, value: ArrayLike, weight: ArrayLike) -> Column:
        documents, values, weights = map(np.asarray, (document, value, weight))
        if documents.dtype.kind == "i" and (np.diff(documents) > 0).all():  # as results have them
            return cls(
                documents=documents, values=values.astype(float), weights=weights.astype(float)
            )
        documents, index = np.unique(documents, return_inverse=True)
        return cls(
            documents=documents,
            values=np.bincount(index, values.astype(float), len(documents)),
            weights=np.bincount(index, weights.astype(float), len(documents)),
        )

    def only(self, documents: NDArray) -> Column:
        """Return the column on ``documents``, all of which it must have."""
        if documents is self.documents or np.array_equal(documents, self.documents):
            return self
        index = np.searchsorted(self.documents, documents)
        return Column(documents=documents, values=self.values[index], weights=self.weights[index])


def joined(columns: Mapping[str, Column]) -> Column:
    """Return the documents of several tasks (by name) as one column."""
    parts = [
        [f"{task} {document}" for document in column.documents] for task, column in columns.items()
    ]
    return Column.of(
        np.concatenate(parts),
        np.concatenate([column.values for column in columns.values()]),
        np.concatenate([column.weights for column in columns.values()]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """Hold columns on the same documents: ``values`` and ``weights`` are [documents, columns]."""

    values: Floats
    weights: Floats
    index: dict[object, int] = field(default_factory=dict)  # column's name → its index

    @classmethod
    def of(cls, columns: dict[object, Column]) -> Panel:
        """Columns on the documents that all of them have."""
        first, *others = columns.values()
        shared = first.documents
        for column in others:
            if not np.array_equal(shared, column.documents):
                shared = np.intersect1d(shared, column.documents, assume_unique=True)
        cut = [column.only(shared) for column in columns.values()]
        return cls(
            values=np.stack([column.values for column in cut], axis=1),
            weights=np.stack([column.weights for column in cut], axis=1),
            index={name: index for index, name in enumerate(columns)},
        )

    @property
    def documents(self) -> int:
        return len(self.values)


# Aggregation → the slope of what is compared, on Σ values / Σ weights.
INFLUENCE = {
    "mean": 1.0,
    "bits_per_byte": -1 / math.log(2),
    **dict.fromkeys(LOG_SCALE, -1.0),
}
ROUNDING = 1e-12  # of sums of doubles, relative to their terms


def is_logarithm(aggregation: str) -> bool:
    """Return whether scores are compared by their ratio, that is by the difference of
    logarithms."""
    return aggregation in (*LOG_SCALE, LOG_MEAN, KL_MEAN)


def as_scored(ratio: Floats, aggregation: str) -> Floats:
    """Return what lm-eval makes of Σ values / Σ weights."""
    if aggregation == LOG_MEAN:
        return ratio
    with np.errstate(over="ignore"):
        return np.exp(-ratio) if aggregation in LOG_SCALE else INFLUENCE[aggregation] * ratio


def estimate_contrast(
    values: Floats, weights: Floats, sign: Floats, aggregation: str
) -> tuple[float, float]:
    """Return Σ sign · score on the scale that is compared, and its standard error.

    ``values`` and ``weights`` are [documents, columns]. The error is by the delta method; both are
    exactly 0 if the terms cancel up to rounding. Accuracies of equally many documents are
    subtracted as counts.
    """
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    ratio = total / weight
    terms = _shares(values, weights, sign, aggregation)
    stderr = _length(terms.sum(axis=1))
    stderr = 0.0 if stderr <= ROUNDING * _length(terms) else stderr
    if aggregation == LOG_MEAN:
        return float(np.log(ratio) @ sign), stderr
    slope = INFLUENCE[aggregation]
    if np.all(weight == weight[0]):
        estimate = slope * float(total @ sign) / float(weight[0])
    else:
        estimate = slope * float(ratio @ sign)
    if abs(estimate) <= ROUNDING * abs(slope) * float(np.abs(ratio) @ np.abs(sign)):
        estimate = 0.0
    return estimate, stderr


def shares(values: Floats, weights: Floats, sign: Floats, aggregation: str) -> Floats:
    """Return each document's share of the error of ``estimate_contrast``, [documents]; their sum
    is 0 but for leverage."""
    return _shares(values, weights, sign, aggregation).sum(axis=1)


def effective_documents(weights: Floats) -> float:
    """Return how many equally long documents would tell as much: (Σw)² / Σw², by Kish; at least
    2."""
    return max(2.0, float(np.min(weights.sum(axis=0) ** 2 / np.sum(weights**2, axis=0))))


def _length(terms: Floats) -> float:
    documents = len(terms)
    return math.sqrt((documents - 1) / documents * float(np.sum(terms**2)))


def _shares(values: Floats, weights: Floats, sign: Floats, aggregation: str) -> Floats:
    """Linearize a ratio of sums (delta method): [documents, columns].

    Each document's share is divided by 1 − its leverage, since a long page pulls the ratio
    towards itself.
    """
    total, weight = values.sum(axis=0), weights.sum(axis=0)
    ratio = total / weight
    slope = 1 / ratio if aggregation == LOG_MEAN else INFLUENCE[aggregation]
    terms = (values - ratio * weights) / (1 - weights / weight)
    return terms * (slope * sign / weight)


# f1 and mcc are no means over documents, but metrics of all right answers and predictions at once.
# Their standard error is the jackknife's: the score is computed again without each document.


def pair_scores(gold: Floats, predictions: Floats, aggregation: str) -> tuple[Floats, Floats]:
    """Return the score of each column of ``predictions`` [documents, columns] against ``gold``
    [documents], and the scores without each document [documents, columns]."""
    scores, left_out = [], []
    for column in predictions.T:
        rows = _counted(gold, column, aggregation)
        total = rows.sum(axis=0)
        scores.append(_score(total[None], aggregation)[0])
        left_out.append(_score(total - rows, aggregation))
    return np.array(scores), np.stack(left_out, axis=1)


def _counted(gold: Floats, prediction: Floats, aggregation: str) -> Floats:
    """Return what is summed over documents, [documents, sums]."""
    if aggregation == "f1":  # of class 1: both, gold, prediction
        both = (gold == 1) & (prediction == 1)
        return np.stack([both, gold == 1, prediction == 1], axis=1).astype(float)
    kinds = np.unique(np.concatenate([gold, prediction]))
    parts = [answers[:, None] == kinds for answers in (gold, prediction)]
    ones = np.ones((len(gold), 1))
    return np.hstack([ones, (gold == prediction)[:, None], *parts]).astype(float)


def _score(sums: Floats, aggregation: str) -> Floats:
    """Return the scores of ``sums`` [rounds, sums]; 0 if it is not defined, as scikit-learn says.

    f1 is 2 · both / (gold + prediction). mcc over any number of classes is Gorodkin's (2004,
    Computational Biology and Chemistry 28: 367–374).
    """
    if aggregation == "f1":
        above, below = 2 * sums[..., 0], sums[..., 1] + sums[..., 2]
    else:
        number, right = sums[..., 0], sums[..., 1]
        gold, prediction = np.split(sums[..., 2:], 2, axis=-1)
        above = right * number - (gold * prediction).sum(axis=-1)
        spread = [number**2 - (answers**2).sum(axis=-1) for answers in (gold, prediction)]
        below = np.sqrt(spread[0] * spread[1])
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
