"""Many tests at once: Holm (any false claim) and Benjamini–Hochberg (share of false claims)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from statsmodels.stats.multitest import multipletests

from qbench.comparison.statistics.effect import Effect
from qbench.comparison.statistics.seeds import SeedEffect

Tested = TypeVar("Tested", Effect, SeedEffect)


def adjust(effects: Sequence[Tested]) -> list[Tested]:
    """The same effects with p adjusted over all of them, in the same order."""
    if not effects:
        return []
    raw = [effect.p for effect in effects]
    holm = multipletests(raw, method="holm")[1]
    bh = multipletests(raw, method="fdr_bh")[1]
    return [
        dataclasses.replace(effect, p_holm=float(a), p_bh=float(b))
        for effect, a, b in zip(effects, holm, bh, strict=True)
    ]
