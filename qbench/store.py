"""Records on disk: atomic, locked, resumable, verified by checksum. Imports no torch.

    DIR/grid.json                                             what the last run was of
    DIR/grids/<id>.json                                       what each run was of
    DIR/records/<checkpoint>/<quantizer>/<key16>.json         the record
    DIR/records/…/<key16>.<digest16>.outcomes.parquet         per-document outcomes
    DIR/records/…/<key16>.<digest16>.responses.parquet        every scored continuation
    DIR/records/…/<key16>.<digest16>.divergences.parquet      KL by request, or by token
    DIR/records/…/<key16>.log                                 what the libraries printed
    DIR/analysis/grid.json                                    which analyses are meant
    DIR/analysis/<checkpoint>/<quantizer>/<key16>.json        one cell's
    DIR/analysis/long-context/…                               of texts beyond the trained context
    DIR/analysis/sensitivity/…                                of a linear layer or block at a time
    DIR/records.tar.xz                                        all of these but logs, where a folder
                                                              comes as one file
    DIR/.unpacked                                             digest of what was unpacked

A record carries its own checksum and those of its Parquet files, whose names begin with theirs.
It is written last, so one that can be read is whole, and one that is replaced stays whole until
its successor is.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from filelock import FileLock
from pydantic import ValidationError

from qbench.errors import (
    DamagedError,
    NewerSchemaError,
    OutputError,
    ResultsError,
    SchemaError,
    validation_line,
)
from qbench.files import (
    NAME,
    clean_temporaries,
    content_key,
    digest,
    file_digest,
    require_folder,
    write_atomically,
)
from qbench.records import (
    DIVERGENCE_COLUMNS,
    KEY_DIGITS,
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
    RESPONSE_DEFAULTS,
    SCHEMA_VERSION,
    Analysis,
    AnalysisManifest,
    CellKey,
    Record,
    RecordModel,
    RunManifest,
    Sensitivity,
    StoredTable,
)

if TYPE_CHECKING:
    import pandas as pd

GRIDS = "grids"
CHECKSUM = "checksum"
ARCHIVE = "records.tar.xz"
PACKED = re.compile(rf"grid\.json|(grids|records|analysis)(/{NAME})+\.(json|parquet)")  # in it
UNPACKED = ".unpacked"  # holds the SHA-256 of the archive that was laid out
AGAIN, ANALYZE = "run the recipe again", "run `qbench analyze` again"

COLUMNS = {
    "outcomes": OUTCOME_COLUMNS,
    "responses": RESPONSE_COLUMNS,
    "divergences": DIVERGENCE_COLUMNS,
}

Table = Literal["outcomes", "responses", "divergences"]
T = TypeVar("T", bound=RecordModel)
Made = TypeVar("Made", Record, Analysis, Sensitivity)
Asked = TypeVar("Asked", RunManifest, AnalysisManifest)


class CellFiles(Generic[Made, Asked]):
    """One file a cell, each under its key, and the grid that says which are meant."""

    kind: type[Made]
    asked: type[Asked]
    again, written_by = AGAIN, "qbench run"

    def __init__(self, directory: Path, folder: Path) -> None:
        self.directory, self._cells = Path(directory), folder

    def has_manifest(self) -> bool:
        return (self.directory / "grid.json").is_file()

    def manifest(self) -> Asked:
        """What was asked for last. Raises ResultsError where nothing was, or it is damaged."""
        if not self.has_manifest():
            raise ResultsError(
                f"{self.directory}: no grid.json here; name a folder that `{self.written_by}` wrote"
            )
        return read(self.directory / "grid.json", self.asked, self.again)

    def manifest_before(self, say: Callable[[str], None] | None = None) -> Asked | None:
        """The grid that is there, to be replaced; None where it cannot be read, which ``say`` is
        told. Raises NewerSchemaError for a newer qbench's, which must not be."""
        try:
            return self.manifest() if self.has_manifest() else None
        except NewerSchemaError:
            raise
        except ResultsError as error:
            if say is not None:
                say(str(error))
            return None

    def put_manifest(self, grid: Asked, say: Callable[[str], None] | None = None) -> Asked | None:
        """Say which cells are meant; gives which were until now, as ``manifest_before``."""
        before = self.manifest_before(say)
        write(self.directory / "grid.json", grid)
        return before

    def get(self, cell: CellKey) -> Made | None:
        """What ``cell`` asks for, failed ones too; None where there is none.

        Raises DamagedError where it is not what was written, SchemaError where another version
        of qbench wrote it.
        """
        path = self.path(cell)
        if not path.is_file():
            return None
        found = read(path, self.kind, self.again)
        if (found.cell, found.key) != (cell.cell, cell.key):
            raise DamagedError(f"{path}: is of another cell or key; {self.again}")
        return found

    def get_valid(self, cell: CellKey, say: Callable[[str], None] | None = None) -> Made | None:
        """As :meth:`get`, for who can make it again: None where it is damaged or old, and ``say``
        is told why. Raises NewerSchemaError for one that must not be replaced."""
        try:
            return self._verified(cell)
        except NewerSchemaError:
            raise
        except (DamagedError, SchemaError) as error:
            if say is not None:
                say(f"{cell.cell}: made again: {str(error).removesuffix('; ' + self.again)}")
            return None

    def _verified(self, cell: CellKey) -> Made | None:
        return self.get(cell)

    def records(self) -> list[Made]:
        """Those of the grid's cells, in the grid's order, missing ones left out."""
        found = (self.get(cell) for cell in self.manifest().cells)
        return [one for one in found if one is not None]

    def path(self, cell: CellKey) -> Path:
        """Where the file of ``cell`` lies."""
        return self._cells / cell.cell / f"{cell.key[:KEY_DIGITS]}.json"

    def log(self, cell: CellKey) -> Path:
        """Where libraries' output goes while ``cell`` is at work."""
        return self.path(cell).with_suffix(".log")

    def lock_file(self, cell: CellKey) -> Path:
        """Held by the process that is at work on ``cell``; its folder exists."""
        path = self.path(cell).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class Analyses(CellFiles[Made, AnalysisManifest]):
    """The analyses of one ``kind`` of the results folder ``directory``, in its folder ``part``."""

    asked = AnalysisManifest
    again, written_by = ANALYZE, "qbench analyze"

    def __init__(self, directory: Path, kind: type[Made] = Analysis, part: str = "") -> None:
        unpack(Path(directory))
        folder = Path(directory) / "analysis" / part
        super().__init__(folder, folder)
        self.kind = kind

    def records(self) -> list[Made]:
        """As those of a run; none where nothing was analyzed."""
        return super().records() if self.has_manifest() else []

    def put(self, analysis: Made) -> None:
        write(self.path(analysis), analysis)


LONG_CONTEXT, SENSITIVITY = "long-context", "sensitivity"


def long_contexts(directory: Path) -> Analyses[Analysis]:
    return Analyses(directory, Analysis, LONG_CONTEXT)


def sensitivities(directory: Path) -> Analyses[Sensitivity]:
    return Analyses(directory, Sensitivity, SENSITIVITY)


class Store(CellFiles[Record, RunManifest]):
    """The records of one results folder."""

    kind, asked = Record, RunManifest

    def __init__(self, directory: Path, *, grid: RunManifest | None = None, run: str | None = None):
        """``grid``: what to show of the folder, instead of what its last run was of; ``run``: how
        the id of an earlier run begins that is shown instead. Raises ResultsError for another."""
        unpack(Path(directory))
        super().__init__(directory, Path(directory) / "records")
        self._grid, self.run = grid, None if run is None else find_run(self.directory, run)

    @property
    def name(self) -> str:
        """The folder, and which of its runs."""
        return f"{self.directory} (run {self.run})" if self.run else str(self.directory)

    def place(self) -> Path:
        """Where what is made of it goes: the folder, or one in it for an earlier run."""
        return self.directory / "runs" / self.run if self.run else self.directory

    def manifest(self) -> RunManifest:
        """The grid of the last run, or of the one that was asked for. Raises ResultsError where
        there is none, or it is damaged."""
        if self.run is not None:
            return read(self.directory / GRIDS / f"{self.run}.json", RunManifest)
        return self._grid or super().manifest()

    def put_manifest(
        self, grid: RunManifest, say: Callable[[str], None] | None = None
    ) -> RunManifest | None:
        """What killed processes left behind is removed, too."""
        with self._lock():
            before = super().put_manifest(grid, say)
            clean_temporaries(self.directory)
            write(self.directory / GRIDS / f"{run_id(grid)}.json", grid)
        return before

    def _verified(self, cell: CellKey) -> Record | None:
        """Its Parquet files too."""
        record = self.get(cell)
        for name in record.files if record else ():
            self.payload(record, name)
        return record

    def put(
        self,
        record: Record,
        outcomes: pd.DataFrame | None = None,
        responses: pd.DataFrame | None = None,
        divergences: pd.DataFrame | None = None,
    ) -> Record:
        """Write a record and its tables; the record last, each file in one step.

        Returns the record as it was written, with its tables' checksums.
        """
        if outcomes is not None:  # alike beside alike: a seventh smaller
            outcomes = outcomes.sort_values(["task", "metric", "document"], kind="stable")
        tables = {"outcomes": outcomes, "responses": responses, "divergences": divergences}
        payloads = {
            name: _parquet(table, COLUMNS[name])
            for name, table in tables.items()
            if table is not None
        }
        path = self.path(record)
        files = {
            name: StoredTable(sha256=digest(payload), bytes=len(payload))
            for name, payload in payloads.items()
        }
        record = record.model_copy(update={"files": files})
        with self._lock():
            for name, payload in payloads.items():
                write_atomically(self._table_path(record, name), payload)
            write(path, record)
            kept = {self._table_path(record, name) for name in files}
            for old in path.parent.glob(f"{path.stem}.*.*.parquet"):
                if old not in kept:
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

    def _table(self, record: Record, name: Table) -> pd.DataFrame:
        from pyarrow import parquet

        # without threads: where there is no memory for one, pyarrow waits for it for ever
        file = parquet.ParquetFile(io.BytesIO(self.payload(record, name)), pre_buffer=False)
        return file.read(use_threads=False).to_pandas(use_threads=False)

    def payload(self, record: Record, name: Table) -> bytes:
        """A Parquet file's content, verified before any library parses it."""
        if name not in record.files:
            path = self.path(record)
            raise DamagedError(f"{path}: no {name} were written with this record; {AGAIN}")
        path, stated = self._table_path(record, name), record.files[name]
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise DamagedError(f"{path}: missing; {AGAIN}") from None
        if len(payload) != stated.bytes or digest(payload) != stated.sha256:
            raise DamagedError(f"{path}: damaged: its content is not what was written; {AGAIN}")
        return payload

    def _table_path(self, record: Record, name: Table) -> Path:
        """Its checksum is part of the name, so that a table never replaces one that an older record
        still states."""
        stated = record.files[name].sha256[:KEY_DIGITS]
        return self.path(record).with_suffix(f".{stated}.{name}.parquet")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / ".lock"):
            yield


def unpack(directory: Path) -> None:
    """Lay what ``records.tar.xz`` holds beside it, once for each archive that comes, as by a `git
    pull`: ``.unpacked`` says which was the last. What was run here since stays, if it is of another
    key, or better or later than the archive's, and a line on standard error says so. grid.json
    comes last: an unpacking that was stopped is begun again. Raises DamagedError, or OutputError
    for a folder that cannot be written to."""
    archive, mark, grid = (directory / name for name in (ARCHIVE, UNPACKED, "grid.json"))
    if not archive.is_file():
        return
    stated = file_digest(archive).encode()

    def known() -> bool:
        return grid.exists() and mark.is_file() and mark.read_bytes() == stated

    def missing() -> list[tuple[str, bytes]]:
        return [(name, content) for name, content in found if not _stays(directory / name, content)]

    if known():
        return
    found = sorted(_archived(archive), key=lambda one: one[0] == grid.name)
    if not missing():
        with suppress(OutputError):  # of a folder that is read-only
            write_atomically(mark, stated)
        return
    require_folder(directory)
    with FileLock(directory / ".lock"):
        if known():  # another process was here meanwhile
            return
        newer = grid.exists()
        for name, content in missing():
            write_atomically(directory / name, content)
        write_atomically(mark, stated)
    if newer:
        print(
            f"{archive}: newer than what lay beside it; its results are shown now, and what was "
            f"made here stays: `qbench show {directory}` lists the runs",
            file=sys.stderr,
        )


def _archived(archive: Path) -> list[tuple[str, bytes]]:
    """Names and contents of the files in ``archive`` that are ours. Raises DamagedError."""
    try:
        with lzma.open(archive) as file, tarfile.open(fileobj=file, mode="r:") as packed:
            found = [
                (one.name, packed.extractfile(one).read())
                for one in packed
                if one.isfile() and PACKED.fullmatch(one.name)
            ]
            file.read()  # to its end, where its checksum is
            return found
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise DamagedError(f"{archive}: damaged: {error}; fetch it again") from None


def _stays(path: Path, archived: bytes) -> bool:
    """Whether ``path`` holds what is ``archived``, or a record of the same key that is good where
    that is not, or as good and later."""
    if not path.is_file():
        return False
    here = path.read_bytes()
    if here == archived:
        return True
    with suppress(ValueError, KeyError, TypeError):
        mine, theirs = (
            (one["status"] == "ok", datetime.fromisoformat(one["finished"]))
            for one in map(json.loads, (here, archived))
        )
        return mine > theirs
    return False  # a grid, a table, or damaged


def _parquet(table: pd.DataFrame, columns: tuple[str, ...]) -> bytes:
    """Numbers as differences or split into bytes: half of what zstd alone takes."""
    assert tuple(table.columns) == columns, tuple(table.columns)
    kinds = {name: kind.kind for name, kind in table.dtypes.items()}
    encoding = {"i": "DELTA_BINARY_PACKED", "f": "BYTE_STREAM_SPLIT"}
    return table.to_parquet(
        index=False,
        compression="zstd",
        compression_level=19,  # an eighth smaller than by default, 50 ms a cell
        use_dictionary=[name for name, kind in kinds.items() if kind not in encoding],
        column_encoding={name: encoding[kind] for name, kind in kinds.items() if kind in encoding},
        write_statistics=False,  # as long as a small table
        store_schema=False,
    )


def read(path: Path, kind: type[T], again: str = AGAIN) -> T:
    """What ``write`` wrote. Raises SchemaError for another ``schema_version`` than ours,
    DamagedError for any change of content; ``again`` is the remedy that both name."""

    def damaged(what: str) -> DamagedError:
        return DamagedError(f"{path}: damaged: {what}; {again}")

    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise damaged("not whole JSON") from None
    if not isinstance(values, dict):
        raise damaged("not a JSON object")
    version = values.get("schema_version")
    if type(version) is not int:
        raise damaged("it has no schema_version")
    told = f"qbench (schema {version}, this one reads {SCHEMA_VERSION})"
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(f"{path}: written by a newer {told}: update qbench")
    if version < SCHEMA_VERSION:
        raise SchemaError(f"{path}: written by an older {told}: {again}")
    stated = values.pop(CHECKSUM, None)
    if stated is None:
        raise damaged("it has no checksum")
    if stated != content_key(values):
        raise damaged("its content is not what was written")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise damaged(validation_line(error)) from None


def write(path: Path, thing: RecordModel) -> None:
    """Write a record or grid with its checksum, in one step."""
    write_atomically(path, with_checksum(json.loads(thing.model_dump_json())))


def with_checksum(values: dict[str, Any]) -> bytes:
    """JSON text of ``values``, a line a key, and at its end their checksum: SHA-256 of the
    canonical JSON, so that a changed byte is noticed."""
    values = {**values, CHECKSUM: content_key(values)}
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for key, value in values.items()
    ]
    return ("{" + ",\n".join(lines) + "}\n").encode(errors="surrogatepass")


def run_id(grid: RunManifest) -> str:
    """Of what a run was of: 8 hexadecimal digits, the same for the same cells and tasks."""
    content = [grid.tasks, grid.checkpoints, [cell.key for cell in grid.cells]]
    return digest(json.dumps(content).encode())[:8]


def runs(directory: Path) -> list[tuple[str, Path]]:
    """Id and file of what each run into a folder was of, the newest first."""
    files = (Path(directory) / GRIDS).glob("*.json")
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    return [(path.stem, path) for path in newest]


def find_run(directory: Path, wanted: str) -> str:
    """The id that begins with ``wanted``. Raises ResultsError where not exactly one does."""
    known = [name for name, _ in runs(directory)]
    found = [name for name in known if wanted and name.startswith(wanted)]
    if len(found) != 1:
        why = f"{len(found)} runs begin with" if found else "it has no run"
        raise ResultsError(f"{directory}: {why} {wanted!r}; it has {', '.join(known) or 'none'}")
    return found[0]
