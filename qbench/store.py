"""Records on disk: atomic, locked, resumable. Imports no torch.

    DIR/grid.json                                     what the last run was of
    DIR/records/<checkpoint>/<quantizer>/<key16>.json the record
    DIR/records/…/<key16>.outcomes.parquet            per-document outcomes
    DIR/records/…/<key16>.responses.parquet           every scored continuation
    DIR/records/…/<key16>.log                         what the libraries printed

The JSON file is written last, so a record that can be read is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from filelock import FileLock
from pydantic import ValidationError

from qbench.errors import ResultsError
from qbench.record import OUTCOME_COLUMNS, RESPONSE_COLUMNS, Grid, GridCell, Record

KEY_DIGITS = 16


class Store:
    """The records of one results folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def grid(self) -> Grid:
        """The grid of the last run. Raises ResultsError where there is none."""
        path = self.directory / "grid.json"
        if not path.is_file():
            raise ResultsError(
                f"{self.directory}: no grid.json here; name a folder that `qbench run` wrote"
            )
        return _read(path, Grid)

    def has_grid(self) -> bool:
        return (self.directory / "grid.json").is_file()

    def put_grid(self, grid: Grid) -> None:
        with self._lock():
            write_atomically(self.directory / "grid.json", grid.model_dump_json(indent=1).encode())

    def get(self, cell: GridCell) -> Record | None:
        """The record that ``cell`` asks for, failed ones too; None where there is none."""
        path = self._path(cell.cell, cell.key)
        return _read(path, Record) if path.is_file() else None

    def records(self) -> list[Record]:
        """Records of the grid's cells, in the grid's order, missing ones left out."""
        found = (self.get(cell) for cell in self.grid().cells)
        return [record for record in found if record is not None]

    def put(
        self, record: Record, outcomes: pd.DataFrame | None, responses: pd.DataFrame | None
    ) -> None:
        """Write a record and its tables; the record last, each file in one step."""
        path = self._path(record.cell, record.key)
        with self._lock():
            for name, table, columns in (
                ("outcomes", outcomes, OUTCOME_COLUMNS),
                ("responses", responses, RESPONSE_COLUMNS),
            ):
                if table is not None:
                    assert tuple(table.columns) == columns, f"{name}: {tuple(table.columns)}"
                    payload = table.to_parquet(index=False, compression="zstd")
                    write_atomically(path.with_suffix(f".{name}.parquet"), payload)
            write_atomically(path, record.model_dump_json(indent=1).encode())

    def outcomes(self, record: Record) -> pd.DataFrame:
        """Columns ``OUTCOME_COLUMNS``; raises ResultsError where the file is missing."""
        return self._table(record, "outcomes")

    def responses(self, record: Record) -> pd.DataFrame:
        """Columns ``RESPONSE_COLUMNS``; raises ResultsError where the file is missing."""
        return self._table(record, "responses")

    def log(self, cell: GridCell) -> Path:
        """Where libraries' output goes while ``cell`` is at work."""
        return self._path(cell.cell, cell.key).with_suffix(".log")

    def lock_file(self, cell: GridCell) -> Path:
        """Held by the run that is at work on ``cell``; its folder exists."""
        path = self._path(cell.cell, cell.key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _table(self, record: Record, name: str) -> pd.DataFrame:
        path = self._path(record.cell, record.key).with_suffix(f".{name}.parquet")
        if not path.is_file():
            raise ResultsError(f"{path}: missing; run the cell again with --force")
        return pd.read_parquet(path)

    def _path(self, cell: str, key: str) -> Path:
        return self.directory / "records" / cell / f"{key[:KEY_DIGITS]}.json"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / ".lock"):
            yield


def write_atomically(path: Path, payload: bytes) -> None:
    """Write ``payload`` so that ``path`` holds either the old or the new content, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, kind: type[Grid] | type[Record]) -> Grid | Record:
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ResultsError(f"{path}: {place}: {first['msg']}; delete it and run again") from None
