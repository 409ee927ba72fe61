"""Records on disk: atomic, locked, resumable, verified by checksum. Imports no torch.

    DIR/grid.json                                             what the last run was of
    DIR/grids/<id>.json                                       what each run was of
    DIR/records/<checkpoint>/<quantizer>/<key16>.json         the record
    DIR/records/…/<key16>.<digest16>.outcomes.parquet         per-document outcomes
    DIR/records/…/<key16>.<digest16>.responses.parquet        every scored continuation
    DIR/records/…/<key16>.<digest16>.divergences.parquet      KL by request, or by token
    DIR/records/…/<key16>.log                                 what the libraries printed

A record carries its own checksum and those of its Parquet files, whose names begin with theirs.
It is written last, so one that can be read is whole, and one that is replaced stays whole until
its successor is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from filelock import FileLock
from pydantic import ValidationError

from qbench.errors import DamagedError, NewerSchemaError, ResultsError, SchemaError
from qbench.files import clean_temporaries, digest, write_atomically
from qbench.records import (
    AGAIN,
    DIVERGENCE_COLUMNS,
    KEY_DIGITS,
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
    RESPONSE_DEFAULTS,
    SCHEMA_VERSION,
    Grid,
    GridCell,
    Record,
    RecordModel,
    StoredTable,
    dump_with_checksum,
    is_table,
    load_with_checksum,
    table_path,
)

if TYPE_CHECKING:
    import pandas as pd

GRIDS = "grids"

COLUMNS = {
    "outcomes": OUTCOME_COLUMNS,
    "responses": RESPONSE_COLUMNS,
    "divergences": DIVERGENCE_COLUMNS,
}

Table = Literal["outcomes", "responses", "divergences"]
T = TypeVar("T", bound=RecordModel)


class Store:
    """The records of one results folder."""

    def __init__(self, directory: Path, *, grid: Grid | None = None, run: str | None = None):
        """``grid``: what to show of the folder, instead of what its last run was of; ``run``: the
        id of an earlier run that is shown instead."""
        self.directory = Path(directory)
        self._grid, self._run = grid, run

    @property
    def run(self) -> str | None:
        """The id of the earlier run that is shown, None: the last one. Raises ResultsError."""
        return None if self._run is None else find_run(self.directory, self._run).stem

    @property
    def name(self) -> str:
        """The folder, and which of its runs."""
        return f"{self.directory} (run {self.run})" if self._run else str(self.directory)

    def place(self) -> Path:
        """Where what is made of it goes: the folder, or one in it for an earlier run."""
        return self.directory / "runs" / self.run if self.run else self.directory

    def grid(self) -> Grid:
        """The grid of the last run, or of the one that was asked for. Raises ResultsError where
        there is none, or it is damaged."""
        if self._grid is not None:
            return self._grid
        if self._run is not None:
            return read(find_run(self.directory, self._run), Grid)
        path = self.directory / "grid.json"
        if not path.is_file():
            raise ResultsError(
                f"{self.directory}: no grid.json here; name a folder that `qbench run` wrote"
            )
        return read(path, Grid)

    def has_grid(self) -> bool:
        return (self.directory / "grid.json").is_file()

    def put_grid(self, grid: Grid) -> None:
        """Say what the folder is of; what killed processes left behind is removed.

        Raises NewerSchemaError where a newer qbench wrote the grid that is there.
        """
        with self._lock():
            if self.has_grid():
                try:
                    self.grid()
                except NewerSchemaError:
                    raise
                except ResultsError:
                    pass  # damaged or old: written anew
            clean_temporaries(self.directory)
            self._keep_grid()
            write(self.directory / "grid.json", grid)
            write(self.directory / GRIDS / f"{run_id(grid)}.json", grid)

    def _keep_grid(self) -> None:
        """Of a folder that an earlier qbench wrote, or one whose ``grids`` were removed."""
        with suppress(ResultsError):
            last = read(self.directory / "grid.json", Grid) if self.has_grid() else None
            path = self.directory / GRIDS / f"{run_id(last)}.json" if last else None
            if path is not None and not path.exists():
                write(path, last)

    def get(self, cell: GridCell) -> Record | None:
        """The record that ``cell`` asks for, failed ones too; None where there is none.

        Raises DamagedError where it is not what was written, SchemaError where another version
        of qbench wrote it.
        """
        path = self.path(cell.cell, cell.key)
        return read_record(path, cell) if path.is_file() else None

    def whole(self, cell: GridCell, say: Callable[[str], None] | None = None) -> Record | None:
        """The record that ``cell`` asks for, its Parquet files verified too; None where there is
        none that a run may reuse. ``say`` is told why one that is there is none.

        Raises NewerSchemaError for a record that must not be replaced.
        """
        try:
            record = self.get(cell)
            for name in record.files if record else ():
                self.payload(record, name)
        except NewerSchemaError:
            raise
        except (DamagedError, SchemaError) as error:
            if say is not None:
                say(f"{cell.cell}: made again: {str(error).removesuffix('; ' + AGAIN)}")
            return None
        return record

    def records(self) -> list[Record]:
        """Records of the grid's cells, in the grid's order, missing ones left out."""
        found = (self.get(cell) for cell in self.grid().cells)
        return [record for record in found if record is not None]

    def put(
        self,
        record: Record,
        outcomes: pd.DataFrame | None,
        responses: pd.DataFrame | None,
        divergences: pd.DataFrame | None = None,
    ) -> Record:
        """Write a record and its tables; the record last, each file in one step.

        Returns the record as it was written, with its tables' checksums.
        """
        payloads = {}
        tables = {"outcomes": outcomes, "responses": responses, "divergences": divergences}
        for name, table in tables.items():
            if table is not None:
                assert tuple(table.columns) == COLUMNS[name], f"{name}: {tuple(table.columns)}"
                payloads[name] = _parquet(table)
        path = self.path(record.cell, record.key)
        files = {
            name: StoredTable(sha256=digest(payload), bytes=len(payload))
            for name, payload in payloads.items()
        }
        record = record.model_copy(update={"files": files})
        with self._lock():
            _set_aside(path)
            for name, payload in payloads.items():
                write_atomically(table_path(path, record, name), payload)
            write(path, record)
            kept = {table_path(path, record, name) for name in files}
            for old in path.parent.iterdir():
                if old not in kept and is_table(path, old.name):
                    old.unlink()
        return record

    def outcomes(self, record: Record) -> pd.DataFrame:
        """Columns ``OUTCOME_COLUMNS``; raises DamagedError where the file is missing or changed."""
        return self._table(record, "outcomes")

    def responses(self, record: Record) -> pd.DataFrame:
        """Columns ``RESPONSE_COLUMNS``; raises DamagedError as ``outcomes``."""
        table = self._table(record, "responses")
        for name, value in RESPONSE_DEFAULTS.items():
            if name not in table:
                table[name] = value
        return table

    def divergences(self, record: Record) -> pd.DataFrame:
        """Columns ``DIVERGENCE_COLUMNS``; raises DamagedError as ``outcomes``."""
        return self._table(record, "divergences")

    def log(self, cell: GridCell) -> Path:
        """Where libraries' output goes while ``cell`` is at work."""
        return self.path(cell.cell, cell.key).with_suffix(".log")

    def lock_file(self, cell: GridCell) -> Path:
        """Held by the run that is at work on ``cell``; its folder exists."""
        path = self.path(cell.cell, cell.key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _table(self, record: Record, name: Table) -> pd.DataFrame:
        from pyarrow import parquet

        # without threads: where there is no memory for one, pyarrow waits for it for ever
        file = parquet.ParquetFile(io.BytesIO(self.payload(record, name)), pre_buffer=False)
        return file.read(use_threads=False).to_pandas(use_threads=False)

    def payload(self, record: Record, name: Table) -> bytes:
        """A Parquet file's content, verified before any library parses it."""
        record_path = self.path(record.cell, record.key)
        if name not in record.files:
            raise DamagedError(f"{record_path}: no {name} were written with this record; {AGAIN}")
        path, stated = table_path(record_path, record, name), record.files[name]
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise DamagedError(f"{path}: missing; {AGAIN}") from None
        if len(payload) != stated.bytes or digest(payload) != stated.sha256:
            raise DamagedError(f"{path}: damaged: its content is not what was written; {AGAIN}")
        return payload

    def path(self, cell: str, key: str) -> Path:
        """A record's."""
        return self.directory / "records" / cell / f"{key[:KEY_DIGITS]}.json"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / ".lock"):
            yield


def _parquet(table: pd.DataFrame) -> bytes:
    """Numbers as differences or split into bytes: half of what zstd alone takes."""
    kinds = {name: kind.kind for name, kind in table.dtypes.items()}
    encoding = {"i": "DELTA_BINARY_PACKED", "f": "BYTE_STREAM_SPLIT"}
    return table.to_parquet(
        index=False,
        compression="zstd",
        use_dictionary=[name for name, kind in kinds.items() if kind not in encoding],
        column_encoding={name: encoding[kind] for name, kind in kinds.items() if kind in encoding},
    )


def read_record(path: Path, cell: GridCell | None = None) -> Record:
    """The record in the file ``path``; where ``cell`` is given, it must be of that cell.

    Raises DamagedError or SchemaError as ``Store.get``.
    """
    record = read(path, Record)
    if cell is not None and (record.cell, record.key) != (cell.cell, cell.key):
        raise DamagedError(f"{path}: is the record of another cell or key; {AGAIN}")
    return record


def read(path: Path, kind: type[T], again: str = AGAIN) -> T:
    """What ``write`` wrote. Raises DamagedError or SchemaError, with the remedy ``again``."""
    values = load_with_checksum(path, path.read_bytes(), schema=SCHEMA_VERSION, again=again)
    try:
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise DamagedError(f"{path}: damaged: {location or 'all'}: {message}; {again}") from None


def write(path: Path, thing: RecordModel) -> None:
    """Write a record or grid with its checksum, in one step."""
    write_atomically(path, dump_with_checksum(json.loads(thing.model_dump_json())))


def _set_aside(path: Path) -> None:
    """Rename a record of an older schema, which is not this qbench's to replace."""
    if not path.is_file():
        return
    try:
        read(path, Record)
    except NewerSchemaError:
        raise
    except SchemaError:
        path.rename(path.with_suffix(".older.json"))
    except DamagedError:
        pass


def run_id(grid: Grid) -> str:
    """Of what a run was of: 8 hexadecimal digits, the same for the same cells and tasks."""
    content = [grid.tasks, grid.checkpoints, [cell.key for cell in grid.cells]]
    return digest(json.dumps(content).encode())[:8]


def runs(directory: Path) -> list[tuple[str, Path]]:
    """Id and file of what each run into a folder was of, the newest first."""
    files = (Path(directory) / GRIDS).glob("*.json")
    return [(path.stem, path) for path in sorted(files, key=_age)]


def find_run(directory: Path, wanted: str) -> Path:
    """Raises ResultsError where no run, or more than one, begins with ``wanted``."""
    known = runs(directory)
    found = [path for name, path in known if wanted and name.startswith(wanted)]
    if len(found) != 1:
        names = ", ".join(name for name, _ in known) or "none"
        raise ResultsError(f"--run {wanted}: {directory} has no such run; it has {names}")
    return found[0]


def _age(path: Path) -> float:
    return -path.stat().st_mtime
