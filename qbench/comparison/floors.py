"""How far batching alone moves scores, as ``qbench noise`` left it in a results folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qbench.errors import ResultsError
from qbench.records import SCHEMA_VERSION, Grid, dump_with_checksum, load_with_checksum
from qbench.store import Store

FILE = "noise.json"
AGAIN = "run `qbench noise` again, or remove the file"


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


def to_bytes(cells: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The content of ``noise.json``: by cell its ``key``, its ``floors``, and what else was
    measured."""
    return dump_with_checksum({"schema_version": SCHEMA_VERSION, "cells": dict(cells)})


def read_noise(store: Store) -> dict[str, Any] | None:
    """The values of ``noise.json``, verified; None without the file. Raises ResultsError where
    another version of qbench wrote it, or where it is damaged."""
    path = store.directory / FILE
    if not path.is_file():
        return None
    return load_with_checksum(path, path.read_bytes(), schema=SCHEMA_VERSION, again=AGAIN)


def read_floors(store: Store, grid: Grid) -> Floors:
    """The floors of ``noise.json``, empty without the file. Raises ResultsError for a file that
    is not what ``qbench noise`` wrote."""
    path, noise = store.directory / FILE, read_noise(store)
    if noise is None:
        return Floors()
    keys = {cell.cell: cell.key for cell in grid.cells}
    of: dict[tuple[str, str, str], float] = {}
    stale = []
    try:
        for cell, measured in noise["cells"].items():
            checkpoint = cell.rpartition("/")[0]
            if measured["key"] != keys.get(cell):
                stale.append(checkpoint)
                continue
            for task, metrics in measured["floors"].items():
                for metric, floor in metrics.items():
                    of[checkpoint, task, metric] = float(floor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: not what `qbench noise` writes ({error!r}); {AGAIN}") from None
    return Floors(of=of, stale=tuple(stale))
