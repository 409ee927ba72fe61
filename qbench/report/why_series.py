"""How the cells of a figure are told apart: several trainings of one kind look alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qbench.records import Analysis, Sensitivity
from qbench.report.style import DASHES, MARKERS, SERIES

Replicates = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One cell's: its place among the looks, and what the legend calls it."""

    index: int
    label: str

    @property
    def colour(self) -> str:
        return SERIES[self.index % len(SERIES)]

    @property
    def marker(self) -> str:
        return MARKERS[self.index % len(MARKERS)]

    @property
    def dash(self) -> str:
        return DASHES[self.index % len(DASHES)]

    @property
    def line(self) -> dict[str, str]:
        """As matplotlib takes it."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dash,
            "label": self.label,
        }


def series(cells: Sequence[Analysis | Sensitivity], replicates: Replicates) -> list[Series]:
    """Of each cell, in order."""
    kinds = {member: name for name, members in replicates.items() for member in members}
    labels = [f"{kinds.get(one.checkpoint, one.checkpoint)}/{one.quantizer}" for one in cells]
    places = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    return [Series(index=places[label], label=label) for label in labels]


def names(found: Sequence[Series]) -> list[str]:
    """What the legend says, each once."""
    return list(dict.fromkeys(one.label for one in found))
