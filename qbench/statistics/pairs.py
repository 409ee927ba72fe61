"""Metrics over all documents at once, of right answers and predictions: f1 and mcc.

Such a score is not a mean over documents, so its error comes from resampling documents. For each
sample the score is computed again from its counts, as scikit-learn does it for lm-eval.
"""

from __future__ import annotations

import numpy as np

from qbench.statistics.panel import ROUNDS, Floats, drawn_sums

PAIRED = ("f1", "matthews_corrcoef")  # lm-eval's names for how documents become the score


def pair_scores(
    gold: Floats, predictions: Floats, aggregation: str, *, rounds: int = ROUNDS
) -> tuple[Floats, Floats]:
    """The score of each column of ``predictions`` [documents, columns] against ``gold``
    [documents], and of ``rounds`` draws of documents with replacement [rounds, columns]."""
    rows = np.hstack([_counted(gold, column, aggregation) for column in predictions.T])
    drawn = drawn_sums(rows, rounds)
    columns = predictions.shape[1]
    whole = _score(rows.sum(axis=0).reshape(1, columns, -1), aggregation)[0]
    return whole, _score(drawn.reshape(rounds, columns, -1), aggregation)


def _counted(gold: Floats, prediction: Floats, aggregation: str) -> Floats:
    """What is summed over documents, [documents, sums]."""
    if aggregation == "f1":  # of class 1: both, gold, prediction
        both = (gold == 1) & (prediction == 1)
        return np.stack([both, gold == 1, prediction == 1], axis=1).astype(float)
    kinds = np.unique(np.concatenate([gold, prediction]))
    parts = [one[:, None] == kinds for one in (gold, prediction)]
    found = [np.ones((len(gold), 1)), (gold == prediction)[:, None], *parts]
    return np.hstack(found).astype(float)


def _score(sums: Floats, aggregation: str) -> Floats:
    """Of sums [rounds, columns, sums]; 0 where it is not defined, as scikit-learn says.

    f1 is 2 · both / (gold + prediction). mcc over any number of classes is Gorodkin's (2004,
    Computational Biology and Chemistry 28: 367–374).
    """
    if aggregation == "f1":
        above, below = 2 * sums[..., 0], sums[..., 1] + sums[..., 2]
    else:
        number, right = sums[..., 0], sums[..., 1]
        gold, prediction = np.split(sums[..., 2:], 2, axis=-1)
        above = right * number - (gold * prediction).sum(axis=-1)
        spread = [number**2 - (one**2).sum(axis=-1) for one in (gold, prediction)]
        below = np.sqrt(spread[0] * spread[1])
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
