"""Metrics over all documents at once, of right answers and predictions: f1 and mcc.

Such a score is not a mean over documents. Its standard error is the jackknife's: the score is
computed again without each document.
"""

from __future__ import annotations

import numpy as np

from qbench.statistics.panel import Floats

PAIRED = ("f1", "matthews_corrcoef")  # lm-eval's names for how documents become the score


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
