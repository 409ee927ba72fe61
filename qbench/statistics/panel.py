"""Outcomes of several cells on the same documents, and contrasts of their scores.

A score is a function of Σ values / Σ weights: that ratio itself for accuracies, exp(−ratio) for
perplexities, which are compared by their logarithm, −ratio. So is KL divergence: its contrasts are
of ln(mean). All functions take many contrasts at once, a row of signs each [contrasts, columns]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from qbench.metrics import KL_MEAN, LOG_MEAN, LOG_SCALE

Floats = NDArray[np.float64]
Signs = Mapping[object, float]  # name of a column → its sign in a sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Hold one metric of one cell, summed by document. ``documents`` is sorted and unique;
    ``values`` and ``weights`` are sums over the document's rows, so that a document with several
    rows is one unit (cluster) of every statistic."""

    documents: NDArray
    values: Floats
    weights: Floats

    @classmethod
    def of(cls, document: ArrayLike, value: ArrayLike, weight: ArrayLike) -> Column:
        """Return the column of arrays [rows] ``document`` (id), ``value`` and ``weight``, summed by
        document."""
        documents = np.asarray(document)
        values, weights = (np.asarray(each, float) for each in (value, weight))
        if not (documents.dtype.kind == "i" and (np.diff(documents) > 0).all()):
            documents, index = np.unique(documents, return_inverse=True)
            values, weights = (np.bincount(index, w, len(documents)) for w in (values, weights))
        return cls(documents=documents, values=values, weights=weights)

    def only(self, documents: NDArray) -> Column:
        """Return the column reduced to ``documents``, all of which it must have."""
        if documents is self.documents or np.array_equal(documents, self.documents):
            return self
        index = np.searchsorted(self.documents, documents)
        return Column(documents=documents, values=self.values[index], weights=self.weights[index])


def on_shared_documents(columns: Iterable[Column]) -> list[Column]:
    """Return the columns reduced to the documents that all of them have."""
    columns = [*columns]
    shared = columns[0].documents
    for column in columns[1:]:
        if column.documents is not shared and not np.array_equal(shared, column.documents):
            shared = np.intersect1d(shared, column.documents, assume_unique=True)
    return [column.only(shared) for column in columns]


def joined(columns: Mapping[str, Column]) -> Column:
    """Return the columns of several tasks as one over all of their documents, "task document"."""
    parts = [[f"{task} {name}" for name in each.documents] for task, each in columns.items()]
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
    def of(cls, columns: Mapping[object, Column]) -> Panel:
        """Return the columns reduced to the documents that all of them have."""
        cut = on_shared_documents(columns.values())
        weights = np.atleast_2d(cut[0].weights)
        if not all(np.array_equal(weights[0], column.weights) for column in cut):
            weights = np.stack([column.weights for column in cut])
        return cls(
            values=np.stack([column.values for column in cut]).T,
            weights=np.broadcast_to(weights, (len(cut), weights.shape[1])).T,
            index={name: index for index, name in enumerate(columns)},
        )

    @property
    def documents(self) -> int:
        """Return how many documents the columns have."""
        return len(self.values)

    def signs(self, contrasts: Sequence[Signs]) -> Floats:
        """Return contrasts as signs [contrasts, columns]; 0 for columns not named."""
        signs = np.zeros((len(contrasts), len(self.index)))
        for row, contrast in zip(signs, contrasts, strict=True):
            row[[self.index[name] for name in contrast]] = [*contrast.values()]
        return signs


# Aggregation → the slope of what is compared, on Σ values / Σ weights.
INFLUENCE = {"mean": 1.0, "bits_per_byte": -1 / math.log(2), **dict.fromkeys(LOG_SCALE, -1.0)}
ROUNDING = 1e-12  # of sums of doubles, relative to their terms
UNTHREADED = 10_000  # terms of a dot product that OpenBLAS computes in one thread


def as_scored(ratio: Floats, aggregation: str) -> Floats:
    """Return the scores that lm-eval computes by ``aggregation`` from ``ratio``, Σ values / Σ
    weights; KL divergences and lengths of answers are that ratio."""
    if aggregation in (LOG_MEAN, KL_MEAN):
        return ratio
    with np.errstate(over="ignore"):
        return np.exp(-ratio) if aggregation in LOG_SCALE else INFLUENCE[aggregation] * ratio


@dataclass(frozen=True, slots=True, eq=False)
class Contrasts:
    """Hold contrasts of scores, Σ sign · score on the scale that is compared: ``signs`` [contrasts,
    columns], estimates and standard errors [contrasts]; [contrasts, documents]: the documents'
    shares of the error, ``terms``, and Σ sign · value, ``steps``."""

    signs: Floats
    estimate: Floats
    stderr: Floats
    terms: Floats
    steps: Floats

    def __getitem__(self, places: NDArray) -> Contrasts:
        """Return the contrasts at ``places``, which rise; all without copying them."""
        if len(places) == len(self.signs):
            return self
        parts = (self.signs, self.estimate, self.stderr, self.terms, self.steps)
        return Contrasts(*(part[places] for part in parts))


class Scores:
    """Computes the scores of columns on the scale that is compared, linearized (delta method).
    ``shares`` are each document's share of a score's error, [columns, documents], which add up to 0
    but for leverage: a share is divided by 1 − its leverage, for a long page pulls the ratio."""

    def __init__(self, panel: Panel, aggregation: str) -> None:
        self.aggregation, self.documents = aggregation, panel.documents
        self.values, weights = panel.values.T, panel.weights.T  # [columns, documents]
        self.totals, self.weights = self.values.sum(axis=1), weights.sum(axis=1)
        self.ratio = self.totals / self.weights
        slope = 1 / self.ratio if aggregation == LOG_MEAN else INFLUENCE[aggregation]
        shares, room = self.ratio[:, None] * weights, weights / self.weights[:, None]
        np.subtract(self.values, shares, out=shares)  # in place: fresh memory takes longer
        shares /= np.subtract(1, room, out=room)
        shares *= (slope / self.weights)[:, None]
        self.shares, self.errors = shares, error_of(shares)

    def contrasts(self, signs: Floats) -> Contrasts:
        """Return the contrasts of ``signs`` [contrasts, columns]. Estimate and error are exactly 0
        if the terms cancel up to rounding. Accuracies of equal size are subtracted as counts."""
        mostly_zeros = sparse.csr_array(signs)
        terms, steps = mostly_zeros @ self.shares, mostly_zeros @ self.values
        stderr = error_of(terms)
        stderr[stderr <= ROUNDING * np.sqrt(signs**2 @ self.errors**2)] = 0.0
        if self.aggregation == LOG_MEAN:
            return Contrasts(signs, signs @ np.log(self.ratio), stderr, terms, steps)
        slope, used = INFLUENCE[self.aggregation], signs != 0
        longest = np.max(self.weights * used, axis=1)
        alike = np.all((self.weights == longest[:, None]) | ~used, axis=1)
        estimate = slope * np.where(alike, signs @ self.totals / longest, signs @ self.ratio)
        size = abs(slope) * (np.abs(signs) @ np.abs(self.ratio))
        estimate[np.abs(estimate) <= ROUNDING * size] = 0.0
        return Contrasts(signs, estimate, stderr, terms, steps)


def error_of(terms: Floats) -> Floats:
    """Return the standard error from ``terms`` [..., documents], documents' shares of the error."""
    documents = terms.shape[-1]
    return np.sqrt((documents - 1) / documents * squared_norms(terms))


def squared_norms(rows: Floats) -> Floats:
    """Return the sum of squares of each of ``rows`` [..., documents], in parts so short that BLAS
    starts no threads, which take ten times as long on busy cores."""
    parts = [rows[..., i : i + UNTHREADED] for i in range(0, rows.shape[-1], UNTHREADED)]
    return sum(np.vecdot(part, part) for part in parts)


def score_error(values: Floats, weights: Floats, aggregation: str) -> float:
    """Return the standard error of the score of one column's ``values`` and ``weights``
    [documents], on the scale that is compared (of perplexities the logarithm), by the delta method.
    """
    scores = Scores(Panel(values=values[:, None], weights=weights[:, None]), aggregation)
    return float(scores.errors[0])


def effective_documents(weights: Floats) -> Floats:
    """Return the effective number of equally long documents, by rows of ``weights`` [columns,
    documents]: Kish's (Σw)² / Σw²; at least 2."""
    return np.maximum(2.0, weights.sum(axis=1) ** 2 / np.sum(weights**2, axis=1))
