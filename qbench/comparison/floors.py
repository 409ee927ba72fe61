"""How far batching alone moves scores, as ``qbench noise`` left it in a results folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from qbench.errors import ResultsError
from qbench.record import Grid
from qbench.store import Store

FILE = "noise.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Floors:
    """``of`` maps (checkpoint, task, metric) to the largest move of that score, in its units;
    ``stale`` names checkpoints whose noise was measured under another key than the grid's."""

    of: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    stale: tuple[str, ...] = ()

    def between(self, checkpoint: str, other: str, task: str, metric: str) -> float | None:
        """The most that batching alone may move the difference of two checkpoints' scores: both
        floors together. None where one was not measured."""
        ends = [self.of.get((name, task, metric)) for name in (checkpoint, other)]
        return None if None in ends else sum(ends)


def read_floors(store: Store, grid: Grid) -> Floors:
    """The floors of ``noise.json``, empty without the file. Raises ResultsError for a file that
    ``qbench noise`` did not write."""
    path = store.directory / FILE
    if not path.is_file():
        return Floors()
    keys = {cell.cell: cell.key for cell in grid.cells}
    of: dict[tuple[str, str, str], float] = {}
    stale = []
    try:
        for cell, measured in json.loads(path.read_text()).items():
            checkpoint = cell.rpartition("/")[0]
            if measured["key"] != keys.get(cell):
                stale.append(checkpoint)
                continue
            for task, metrics in measured["floors"].items():
                for metric, floor in metrics.items():
                    of[checkpoint, task, metric] = float(floor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path}: not what `qbench noise` writes ({error!r}); run it again or remove the file"
        ) from None
    return Floors(of=of, stale=tuple(stale))
