"""Panels of outcomes for the tests of statistics."""

import numpy as np

from qbench.statistics import Column, Panel, effects

SIMULATIONS = 400
TWO = {"new": 1, "old": -1}
FOUR = {"a": 1, "b": -1, "c": -1, "d": 1}


def panel(*values, weights=None):
    """Of two or four cells' outcomes, each [documents]."""
    return panel_of(dict(zip(TWO if len(values) == 2 else FOUR, values, strict=True)), weights)


def panel_of(values, weights=None):
    """Of outcomes by name, each [documents]."""
    matrix = np.stack([np.asarray(column, dtype=float) for column in values.values()], axis=1)
    weights = np.ones(len(matrix)) if weights is None else weights
    weights = np.repeat(weights[:, None], len(values), axis=1)
    return Panel(values=matrix, weights=weights, index={name: i for i, name in enumerate(values)})


def together(pairs, aggregation, signs=TWO):
    """Return the effects of many pairs of columns, each [documents]."""
    documents = np.arange(len(pairs[0][0]))
    weights = np.ones(len(documents))
    columns, contrasts = {}, []
    for place, pair in enumerate(pairs):
        for name, side in zip(TWO, pair, strict=True):
            values = np.asarray(side, dtype=float)
            columns[name, place] = Column(documents=documents, values=values, weights=weights)
        contrasts.append({(name, place): sign for name, sign in signs.items()})
    return effects(columns, contrasts, aggregation)


def answers(rng, documents, gained, lost):
    """Two cells' right-or-wrong answers with the given shares of changes."""
    change, base = rng.random(documents), rng.random(documents) < 0.6
    new = np.where(change < gained, 1, np.where(change < gained + lost, 0, base))
    old = np.where(change < gained, 0, np.where(change < gained + lost, 1, base))
    return new.astype(float), old.astype(float)
