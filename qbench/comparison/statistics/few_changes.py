"""Over several trainings: the documents' interval where few right-or-wrong answers changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qbench.comparison.statistics.counts import score_interval
from qbench.comparison.statistics.effect import FEW_CHANGES
from qbench.comparison.statistics.panel import Panel

Signs = Mapping[object, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FewChanges:
    """Documents by their mean contribution over the trainings, as a multiple of 1/``unit``."""

    counts: Mapping[int, int]
    unit: int
    lowest: int  # what a document may contribute, in units
    highest: int

    def interval(self, confidence: float) -> tuple[float, float]:
        """Lang's score interval of the mean contribution: a document of which nothing was seen may
        contribute as much in all trainings."""
        low, high = score_interval(
            self.counts, lowest=self.lowest, highest=self.highest, confidence=confidence
        )
        return low / self.unit, high / self.unit


def few_changes(
    panel: Panel, groups: Sequence[Sequence[Signs]], aggregation: str
) -> FewChanges | None:
    """None where answers are not right or wrong, or changed in ``FEW_CHANGES`` documents and more;
    of scores themselves, where as many are right in a training and as many wrong."""
    columns = [panel.index[name] for group in groups for signs in group for name in signs]
    values = panel.values[:, columns]
    binary = np.all((values == 0) | (values == 1)) and np.all(panel.weights[:, columns] == 1)
    if aggregation != "mean" or not binary:
        return None
    steps = [np.stack([_step(panel, one) for one in group], axis=1) for group in groups]
    every = np.concatenate(steps, axis=1)  # [documents, trainings]
    signs = [sign for group in groups for one in group for sign in one.values()]
    same = len(set(signs)) == 1
    changed = every.any(axis=1).sum()
    if same:
        changed = min(changed, (every != signs[0]).any(axis=1).sum())
    if changed >= FEW_CHANGES:
        return None
    unit = math.lcm(*(len(group) for group in groups))
    means = sum(one.sum(axis=1) * (unit // one.shape[1]) for one in steps)
    steps_seen, often = np.unique(means.round(), return_counts=True)
    most = unit * max(1, int(np.abs(every).max())) * len(groups)
    return FewChanges(
        counts={int(step): int(many) for step, many in zip(steps_seen, often, strict=True)},
        unit=unit,
        lowest=0 if same and signs[0] > 0 else -most,
        highest=0 if same and signs[0] < 0 else most,
    )


def _step(panel: Panel, signs: Signs) -> np.ndarray:
    """What each document contributes to a training's contrast: −2 … 2."""
    columns = [panel.index[name] for name in signs]
    return panel.values[:, columns] @ np.array(list(signs.values()), dtype=float)
