"""The smallest effect that a two-sided 5 % test finds with 80 % power."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

LEVEL = 0.05
POWER = 0.80
# The fewest changes, all in one direction, that McNemar's exact test finds significant:
# 2 · 0.5⁶ = 0.031, while five give 0.0625.
FEWEST = 6


def detectable_by_t(stderr: float, documents: float) -> float:
    """For Student's t on so many documents, given the effect's standard error; by the
    noncentral t distribution (Cohen 1988, Statistical Power Analysis, section 2.2)."""
    freedom = documents - 1
    critical = special.stdtrit(freedom, 1 - LEVEL / 2)
    return float(special.nctdtrinc(freedom, 1 - POWER, critical)) * stderr


def detectable_in_steps(square: float, documents: int) -> float:
    """For Student's t on documents' steps −2 … 2, whose mean square is ``square``.

    As many documents change as were seen to, so that the spread shrinks as the mean grows.
    """
    reach = detectable_by_t(1.0, documents)
    return reach * math.sqrt(square / (documents - 1 + reach**2))


@functools.cache
def detectable_by_mcnemar(changed: int, documents: int) -> float:
    """For McNemar's exact test, as a share of the documents.

    As many answers change as were seen to. Where so few would not be significant even if all
    changed in one direction, more of them do: it is never below what ``FEWEST`` changes need.
    Infinite below ``FEWEST`` documents.
    """
    if documents < FEWEST:
        return math.inf
    least = float(special.bdtri(FEWEST - 1, documents, 1 - POWER))
    share = changed / documents
    if share <= least:
        return least
    power = mcnemar_power(share, documents)
    return float(optimize.brentq(lambda gap: power(gap) - POWER, 0.0, share, xtol=1e-9))


def mcnemar_power(changed: float, documents: int) -> Callable[[float], float]:
    """The chance that McNemar's exact test is significant at 5 %, by the difference.

    ``changed`` is the share of answers that change; the difference is how many more of all
    answers change in one direction than in the other.
    """
    spread = math.sqrt(documents * changed * (1 - changed))
    middle = documents * changed
    low = max(0, math.floor(middle - 6 * spread - 1))
    high = min(documents, math.ceil(middle + 6 * spread + 1))
    changes = np.arange(low, high + 1)
    below = special.bdtr(changes.astype(float), documents, changed)
    chances = np.diff(below, prepend=special.bdtr(low - 1, documents, changed) if low else 0.0)
    minority = _critical(changes)
    enough = minority >= 0
    changes, minority, chances = changes[enough], minority[enough], chances[enough]

    def power(difference: float) -> float:
        share = min(1.0, (changed + difference) / (2 * changed))
        found = special.bdtr(minority, changes, share) + special.bdtr(minority, changes, 1 - share)
        return float(chances @ found)

    return power


def _critical(changes: NDArray[np.int64]) -> NDArray[np.float64]:
    """The most changes in the rarer direction with p < 5 %, for each number of changes; −1
    where there are too few."""
    changes = np.maximum(changes, 1)
    guess = np.floor(special.bdtrik(LEVEL / 2, changes, 0.5))
    return guess - (special.bdtr(guess, changes, 0.5) >= LEVEL / 2)
