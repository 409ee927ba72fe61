"""The analyses of a results folder: found, verified, written. Imports no torch.

DIR/analysis/grid.json                                which analyses are meant
DIR/analysis/<checkpoint>/<quantizer>/<key16>.json    one cell's, with its checksum
DIR/analysis/…/<key16>.log                            what the libraries printed
DIR/analysis/long-context/…                           the same, of texts beyond the trained context
DIR/analysis/sensitivity/…                            the same, of a linear layer or block at a time
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from qbench.errors import DamagedError, NewerSchemaError, ResultsError, SchemaError
from qbench.records import Analysis, AnalysisGrid, AnalysisGridCell, Sensitivity
from qbench.store import KEY_DIGITS, read, write

REMEDY = "name a folder that `qbench analyze` wrote"
AGAIN = "run `qbench analyze` again"


LONG_CONTEXT, SENSITIVITY = "long-context", "sensitivity"
Kind = TypeVar("Kind", Analysis, Sensitivity)


class Analyses(Generic[Kind]):
    """Those of one ``kind`` in the results folder ``directory``, or in its folder ``part``."""

    def __init__(self, directory: Path, kind: type[Kind] = Analysis, part: str = "") -> None:
        self.kind = kind
        self.folder = Path(directory) / "analysis" / part

    def grid(self) -> AnalysisGrid:
        """Raises ResultsError where nothing was analyzed, or the file is damaged."""
        path = self.folder / "grid.json"
        if not path.is_file():
            raise ResultsError(f"{self.folder}: no grid.json here; {REMEDY}")
        return read(path, AnalysisGrid, AGAIN)

    def put_grid(self, grid: AnalysisGrid) -> bool:
        """Say which analyses are meant; whether others were until now. Raises NewerSchemaError
        where a newer qbench wrote the grid that is there."""
        try:
            others = self.grid().cells != grid.cells
        except NewerSchemaError:
            raise
        except ResultsError:
            others = False  # none, damaged or old: written anew
        write(self.folder / "grid.json", grid)
        return others

    def get(self, cell: AnalysisGridCell) -> Kind | None:
        """The analysis that ``cell`` asks for, failed ones too; None where there is none.

        Raises DamagedError and SchemaError as ``Store.get``.
        """
        path = self._path(cell)
        if not path.is_file():
            return None
        found = read(path, self.kind, AGAIN)
        if (found.cell, found.key) != (cell.cell, cell.key):
            raise DamagedError(f"{path}: is the analysis of another cell or key; {AGAIN}")
        return found

    def whole(self, cell: AnalysisGridCell, say: Callable[[str], None]) -> Kind | None:
        """As :meth:`get`, for who can make it again: None where it is damaged or old; ``say`` is
        told. Raises NewerSchemaError for one that must not be replaced."""
        try:
            return self.get(cell)
        except NewerSchemaError:
            raise
        except (DamagedError, SchemaError) as error:
            say(f"{cell.cell}: made again: {str(error).removesuffix('; ' + AGAIN)}")
            return None

    def all(self) -> list[Kind]:
        """Those of the grid that are there, failed ones too, in its order; none where nothing was
        analyzed."""
        if not (self.folder / "grid.json").is_file():
            return []
        found = (self.get(cell) for cell in self.grid().cells)
        return [one for one in found if one is not None]

    def put(self, analysis: Kind) -> None:
        cell = AnalysisGridCell(
            checkpoint=analysis.checkpoint, quantizer=analysis.quantizer, key=analysis.key
        )
        write(self._path(cell), analysis)

    def log(self, cell: AnalysisGridCell) -> Path:
        return self._path(cell).with_suffix(".log")

    def lock_file(self, cell: AnalysisGridCell) -> Path:
        """Held by the process that is at work on ``cell``; its folder exists."""
        path = self._path(cell).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _path(self, cell: AnalysisGridCell) -> Path:
        return self.folder / cell.cell / f"{cell.key[:KEY_DIGITS]}.json"


def long_contexts(directory: Path) -> Analyses[Analysis]:
    return Analyses(directory, Analysis, LONG_CONTEXT)


def sensitivities(directory: Path) -> Analyses[Sensitivity]:
    return Analyses(directory, Sensitivity, SENSITIVITY)
