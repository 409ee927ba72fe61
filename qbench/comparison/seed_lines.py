"""Effects over several trainings of one kind, as data. No numbers are made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qbench.comparison.lines import Line

if TYPE_CHECKING:
    from qbench.comparison.statistics import SeedEffect

QUESTIONS = ("scores", "deltas", "damages", "differences")
TESTED = QUESTIONS[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedLine:
    """One metric of one task at one precision, over the trainings of each group.

    ``values``: each training's score, as recorded; ``means`` theirs. The others map a group to its
    effect, as in ``Line``; ``scores`` has the interval of the group's own mean.
    """

    line: Line
    values: Mapping[str, tuple[float | None, ...]]
    means: Mapping[str, float]
    scores: Mapping[str, SeedEffect] = field(default_factory=dict)
    deltas: Mapping[str, SeedEffect] = field(default_factory=dict)
    damages: Mapping[str, SeedEffect] = field(default_factory=dict)
    differences: Mapping[str, SeedEffect] = field(default_factory=dict)
