"""What changed between two sets of results over several trainings of one kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qbench.comparison.result_sets import CellResults, ResultSet
from qbench.comparison.statistics import Panel, SeedEffect, adjust, over_seeds
from qbench.records import Score


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedChange:
    """One metric of one task of one group at one precision: the mean change over its trainings."""

    group: str
    quantizer: str
    score: Score  # of the first training, for its names
    effect: SeedEffect  # new − old


def seed_changes(old: ResultSet, new: ResultSet) -> tuple[SeedChange, ...]:
    """Of groups that both have alike; p-values adjusted over all. Empty without replicates."""
    found = [
        SeedChange(group=group, quantizer=quantizer, score=score, effect=effect)
        for group, members in old.replicates.items()
        if new.replicates.get(group) == members
        for quantizer in _quantizers(old, members)
        for score, effect in _group(old, new, [f"{member}/{quantizer}" for member in members])
    ]
    adjusted = adjust([one.effect for one in found])
    return tuple(
        dataclasses.replace(one, effect=effect) for one, effect in zip(found, adjusted, strict=True)
    )


def _quantizers(results: ResultSet, members: tuple[str, ...]) -> list[str]:
    named = (cell.split("/", 1) for cell in results.cells)
    return [quantizer for checkpoint, quantizer in named if checkpoint == members[0]]


def _group(old: ResultSet, new: ResultSet, cells: list[str]) -> Iterator[tuple[Score, SeedEffect]]:
    sides: dict[str, Mapping[str, CellResults]] = {"old": old.cells, "new": new.cells}
    if not all(cell in side for side in sides.values() for cell in cells):
        return
    for name, score in old.cells[cells[0]].scores.items():
        columns = {
            (side, cell): results[cell].columns.get(name)
            for side, results in sides.items()
            for cell in cells
        }
        if any(column is None for column in columns.values()):
            continue
        signs = [[{("new", cell): 1, ("old", cell): -1} for cell in cells]]
        effect = over_seeds(Panel.of(columns), signs, score.aggregation)
        if effect is not None:
            yield score, effect
