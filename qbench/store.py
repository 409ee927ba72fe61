"""Read and write the records of a results folder, verified by checksum. Imports no torch.

    DIR/grid.json                                             manifest of the last run
    DIR/grids/<id>.json                                       manifest of each run
    DIR/records/<checkpoint>/<quantizer>/<key16>.json         the record of a cell
    DIR/records/…/<key16>.<digest16>.outcomes.parquet         outcomes per document
    DIR/records/…/<key16>.<digest16>.responses.parquet        every scored continuation
    DIR/records/…/<key16>.<digest16>.divergences.parquet      KL per request, or per token
    DIR/records/…/<key16>.<digest16>.answers.parquet          KL per token of the model's answers
    DIR/records/…/<key16>.log                                 output of the libraries
    DIR/analysis/grid.json                                    manifest of the last analysis
    DIR/analysis/<checkpoint>/<quantizer>/<key16>.json        the analysis of a cell
    DIR/analysis/long-context/…                               of texts beyond the trained context
    DIR/analysis/sensitivity/…                                per linear layer or block
    DIR/records.tar.xz                                        all of these but logs in one file
    DIR/.unpacked                                             digest of the archive unpacked last

A record carries its own checksum and those of its Parquet files, whose names begin with theirs.
It is written last: a record that can be read is complete, and one that is being replaced stays
complete until the new one is written.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from filelock import FileLock

from qbench.archive import unpack
from qbench.errors import DamagedError, NewerSchemaError, ResultsError
from qbench.files import clean_temporaries, digest, without_links, write_atomically
from qbench.records import (
    ANSWER_COLUMNS,
    DIVERGENCE_COLUMNS,
    KEY_DIGITS,
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
    RESPONSE_DEFAULTS,
    RUN_AGAIN,
    Analysis,
    AnalysisManifest,
    CellKey,
    Record,
    RecordModel,
    RunManifest,
    Sensitivity,
    StoredTable,
    TaskRecord,
    read_record,
    write_record,
)
from qbench.records import TableName as Table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MANIFEST, MANIFESTS = "grid.json", "grids"
COLUMNS = {
    "outcomes": OUTCOME_COLUMNS,
    "responses": RESPONSE_COLUMNS,
    "divergences": DIVERGENCE_COLUMNS,
    "answers": ANSWER_COLUMNS,
}
R = TypeVar("R", Record, TaskRecord, Analysis, Sensitivity)
LogLine = Callable[[str], None]


class Records(Generic[R]):
    """Records of one ``kind``, a file per cell under the cell's key, with their tables, and the
    manifest that lists the cells."""

    manifest_kind: type[RunManifest | AnalysisManifest] = RunManifest
    remedy, written_by = RUN_AGAIN, "qbench run"

    def __init__(self, root: Path, part: str, cells: str, kind: type[R]) -> None:
        """``root`` is the results folder, whose archive is unpacked; the manifest lies in its
        folder ``part``, the records in ``cells`` within that."""
        self.root, self.kind = Path(root), kind
        self.directory = self.root / part
        self._cells = self.directory / cells
        unpack(self.root)

    def has_manifest(self) -> bool:
        return (self.directory / MANIFEST).is_file()

    def manifest(self) -> Any:
        """Return the manifest of the last run. Raises ResultsError if there is none or it is
        damaged."""
        if not self.has_manifest():
            raise ResultsError(
                f"{self.directory}: no grid.json here; name a folder that `{self.written_by}` wrote"
            )
        return read_record(self.directory / MANIFEST, self.manifest_kind, self.remedy)

    def manifest_before(self, log: LogLine | None = None) -> Any:
        """Return the manifest that a new run is about to replace; None if there is none or it
        cannot be read. ``log`` is then called with the reason. Raises NewerSchemaError for one of a
        newer qbench, which must not be replaced.
        """
        with _logged(log):
            return self.manifest() if self.has_manifest() else None
        return None

    def put_manifest(self, manifest: Any, log: LogLine | None = None) -> Any:
        """Write ``manifest`` and return the one that it replaces, as :meth:`manifest_before`."""
        before = self.manifest_before(log)
        self._write(self.directory / MANIFEST, manifest)
        return before

    def get(self, cell: CellKey) -> R | None:
        """Return the record of ``cell``, finished or failed; None if there is none.

        Raises DamagedError if it is not what was written, SchemaError if another version of qbench
        wrote it.
        """
        path = self.path(cell)
        if not path.is_file():
            return None
        record = read_record(path, self.kind, self.remedy)
        if record.key != cell.key or self.path(record) != path:
            raise DamagedError(f"{path}: is of another cell or key; {self.remedy}")
        return record

    def get_valid(self, cell: CellKey, log: LogLine | None = None) -> R | None:
        """Return the record of ``cell`` if it and its tables are intact, else None.

        For callers that can make the record again: ``log`` is called with what is damaged or old.
        Raises NewerSchemaError for a record of a newer qbench, which must not be replaced.
        """
        with _logged(log, f"{cell.cell}: made again: ", f"; {self.remedy}"):
            record = self.get(cell)
            for name in getattr(record, "files", ()):
                self.payload(record, name)
            return record
        return None

    def records(self) -> list[R]:
        """Return the records of the manifest's cells in its order, missing ones left out."""
        records = (self.get(cell) for cell in self.manifest().cells)
        return [record for record in records if record is not None]

    def path(self, cell: CellKey, suffix: str = ".json") -> Path:
        """Return where the record of ``cell`` lies, or a file beside it with this ``suffix``."""
        return self._cells / cell.cell / f"{cell.key[:KEY_DIGITS]}{suffix}"

    def log(self, cell: CellKey) -> Path:
        """Return where the output of libraries goes while ``cell`` runs."""
        return without_links(self.root, self.path(cell, ".log"))

    def lock_file(self, cell: CellKey) -> Path:
        """Return the lock file of ``cell``, for the process that runs it; its folder exists."""
        path = without_links(self.root, self.path(cell, ".lock"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def put(
        self,
        record: R,
        outcomes: pd.DataFrame | bytes | None = None,
        responses: pd.DataFrame | bytes | None = None,
        divergences: pd.DataFrame | bytes | None = None,
        answers: pd.DataFrame | bytes | None = None,
    ) -> R:
        """Write a record and its tables, and return the record with the tables' checksums.

        A table may be the content of its Parquet file. The record is written last. Tables of this
        record that are not passed are deleted.
        """
        tables = {"outcomes": outcomes, "responses": responses, "divergences": divergences,
                  "answers": answers}  # fmt: skip
        payloads = {
            name: table if isinstance(table, bytes) else _parquet(table, COLUMNS[name])
            for name, table in tables.items()
            if table is not None
        }
        if hasattr(record, "files"):
            files = {
                name: StoredTable(sha256=digest(payload), bytes=len(payload))
                for name, payload in payloads.items()
            }
            record = record.model_copy(update={"files": files})
        path = self.path(record)
        with self._lock():
            for name, payload in payloads.items():
                write_atomically(without_links(self.root, self._table_path(record, name)), payload)
            self._write(path, record)
            kept = {self._table_path(record, name) for name in payloads}
            for old in {*path.parent.glob(f"{path.stem}.*.*.parquet")} - kept:
                old.unlink()
        return record

    def outcomes(self, record: Record) -> pd.DataFrame:
        """Return the columns ``OUTCOME_COLUMNS``. Raises DamagedError if the file is missing or
        changed, or lists a document of a metric twice."""
        table = self._table(record, "outcomes")
        if table.duplicated(["task", "metric", "document"]).any():
            path = self._table_path(record, "outcomes")
            raise DamagedError(f"{path}: damaged: it lists a document twice; {RUN_AGAIN}")
        return table

    def outcome_arrays(self, record: Record) -> dict[tuple[str, str], tuple[np.ndarray, ...]]:
        """Return document, value and weight, arrays [documents], by (task, metric) in the order of
        the file: ``outcomes`` in a tenth of its time. Raises DamagedError as it does."""
        import numpy as np
        from pyarrow import parquet

        names = ["task", "metric"]
        payload = io.BytesIO(self.payload(record, "outcomes"))
        file = parquet.ParquetFile(payload, read_dictionary=names, pre_buffer=False)
        table = file.read(use_threads=False).unify_dictionaries().combine_chunks()
        if not len(table):
            return {}
        tasks, metrics = (table[name].chunk(0) for name in names)
        code = tasks.indices.to_numpy().astype(np.int64) * len(metrics.dictionary)
        code += metrics.indices.to_numpy()
        _, first, group = np.unique(code, return_index=True, return_inverse=True)
        order = np.argsort(first[group], kind="stable")
        ends = np.cumsum(np.bincount(group)[np.argsort(first)])
        arrays = [table[name].to_numpy()[order] for name in ("document", "value", "weight")]
        groups = {}
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            row = int(order[start])
            document, *values = (array[start:end] for array in arrays)
            if not (np.diff(document) > 0).all() and len(np.unique(document)) < len(document):
                path = self._table_path(record, "outcomes")
                raise DamagedError(f"{path}: damaged: it lists a document twice; {RUN_AGAIN}")
            groups[tasks[row].as_py(), metrics[row].as_py()] = (document, *values)
        return groups

    def responses(self, record: Record) -> pd.DataFrame:
        """Return the columns ``RESPONSE_COLUMNS``. Raises DamagedError as ``outcomes``."""
        table = self._table(record, "responses")
        for name, value in RESPONSE_DEFAULTS.items():
            if name not in table:
                table[name] = value
        return table

    def divergences(self, record: Record) -> pd.DataFrame:
        """Return the columns ``DIVERGENCE_COLUMNS``. Raises DamagedError as ``outcomes``."""
        return self._table(record, "divergences")

    def answers(self, record: Record) -> pd.DataFrame:
        """Return the columns ``ANSWER_COLUMNS``. Raises DamagedError as ``outcomes``."""
        return self._table(record, "answers")

    def _table(self, record: Record, name: Table) -> pd.DataFrame:
        from pyarrow import parquet

        # without threads: if there is no memory for one, pyarrow waits for it for ever
        file = parquet.ParquetFile(io.BytesIO(self.payload(record, name)), pre_buffer=False)
        return file.read(use_threads=False).to_pandas(use_threads=False)

    def payload(self, record: Record, name: Table) -> bytes:
        """Return the content of a Parquet file, verified before a library parses it. Raises
        DamagedError if it is missing or changed."""
        if name not in record.files:
            path = self.path(record)
            raise DamagedError(f"{path}: no {name} were written with this record; {RUN_AGAIN}")
        path, stored = self._table_path(record, name), record.files[name]
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise DamagedError(f"{path}: missing; {RUN_AGAIN}") from None
        if len(payload) != stored.bytes or digest(payload) != stored.sha256:
            raise DamagedError(f"{path}: damaged: its content is not what was written; {RUN_AGAIN}")
        return payload

    def _table_path(self, record: Record, name: Table) -> Path:
        """Return the path of a table. Its checksum is part of the name, so that a new table never
        replaces one that the old record still names."""
        return self.path(record, f".{record.files[name].sha256[:KEY_DIGITS]}.{name}.parquet")

    def _write(self, path: Path, content: RecordModel) -> None:
        write_record(without_links(self.root, path), content)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(without_links(self.root, self.directory / ".lock")):
            yield


@contextmanager
def _logged(log: LogLine | None, before: str = "", remedy: str = "") -> Iterator[None]:
    """Call ``log`` with why a file cannot be read, ``before`` it and without the ``remedy``. Raises
    NewerSchemaError: what a newer qbench wrote must not be replaced."""
    try:
        yield
    except NewerSchemaError:
        raise
    except ResultsError as error:
        if log is not None:
            log(before + str(error).removesuffix(remedy))


class Analyses(Records[R]):
    """The analyses of one ``kind`` in the results folder ``directory``, in its folder ``part``."""

    manifest_kind = AnalysisManifest
    remedy, written_by = "run `qbench analyze` again", "qbench analyze"

    def __init__(self, directory: Path, kind: type[R] = Analysis, part: str = "") -> None:
        super().__init__(directory, f"analysis/{part}", "", kind)

    def records(self) -> list[R]:
        """Return the analyses of the manifest's cells; none if nothing was analyzed."""
        return super().records() if self.has_manifest() else []


LONG_CONTEXT, SENSITIVITY = "long-context", "sensitivity"


def long_contexts(directory: Path) -> Analyses[Analysis]:
    return Analyses(directory, Analysis, LONG_CONTEXT)


def sensitivities(directory: Path) -> Analyses[Sensitivity]:
    return Analyses(directory, Sensitivity, SENSITIVITY)


class Store(Records[Record]):
    """The records of one results folder, with their tables."""

    def __init__(
        self, directory: Path, *, manifest: RunManifest | None = None, run: str | None = None
    ) -> None:
        """``manifest`` replaces that of the last run; ``run`` is the beginning of the id of an
        earlier run to show instead. Raises ResultsError if there is no such run."""
        super().__init__(directory, "", "records", Record)
        self._manifest, self.run = manifest, None if run is None else find_run(self.root, run)

    @property
    def name(self) -> str:
        """Return the folder's path, and the run's id if it is not the last run."""
        return f"{self.directory} (run {self.run})" if self.run else str(self.directory)

    def output(self, name: str = "") -> Path:
        """Return where to write the file or folder ``name`` that is made from these results.

        It lies in the folder, or in ``runs/ID`` for an earlier run. Raises OutputError if a
        symbolic link is in the way.
        """
        folder = self.directory / "runs" / self.run if self.run else self.directory
        return without_links(self.directory, folder / name) if name else folder

    def manifest(self) -> RunManifest:
        """Return the manifest of the last run, or of the one that was chosen. Raises ResultsError
        if there is none or it is damaged."""
        if self.run is not None:
            return read_record(self.directory / MANIFESTS / f"{self.run}.json", RunManifest)
        return self._manifest or super().manifest()

    def put_manifest(self, manifest: RunManifest, log: LogLine | None = None) -> RunManifest | None:
        """Write ``manifest`` as that of the last run and return the one that it replaces, as
        :meth:`Records.put_manifest`. Removes what killed processes left in the folder."""
        with self._lock():
            before = super().put_manifest(manifest, log)
            clean_temporaries(self.directory)
            self._write(self.directory / MANIFESTS / f"{run_id(manifest)}.json", manifest)
        return before


class KeyedStore(Records[R]):
    """Records by their key alone, whatever their cells are called, in the folder ``cache``: of
    finished cells, or TaskRecords of finished tasks under their :func:`qbench.cache.task_key`."""

    def __init__(self, cache: Path, kind: type[R]) -> None:
        super().__init__(cache / ("tasks" if kind is TaskRecord else "cells"), "", "", kind)

    def path(self, cell: CellKey, suffix: str = ".json") -> Path:
        return self.directory / f"{cell.key[:KEY_DIGITS]}{suffix}"


def _parquet(table: pd.DataFrame, columns: tuple[str, ...]) -> bytes:
    """Return ``table`` as a Parquet file. Numbers are stored as differences or split into bytes,
    which takes half of what zstd alone does."""
    assert tuple(table.columns) == columns, tuple(table.columns)
    if columns == OUTCOME_COLUMNS:  # like values side by side compress a seventh better
        table = table.sort_values(["task", "metric", "document"], kind="stable")
    kinds = {name: kind.kind for name, kind in table.dtypes.items()}
    encoding = {"i": "DELTA_BINARY_PACKED", "f": "BYTE_STREAM_SPLIT"}
    return table.to_parquet(
        index=False,
        compression="zstd",
        compression_level=19,  # an eighth smaller than by default, 50 ms per cell
        use_dictionary=[name for name, kind in kinds.items() if kind not in encoding],
        column_encoding={name: encoding[kind] for name, kind in kinds.items() if kind in encoding},
        write_statistics=False,  # as long as a small table
        store_schema=False,
    )


def run_id(manifest: RunManifest) -> str:
    """Return 8 hexadecimal digits that are the same for the same cells and tasks."""
    content = [manifest.tasks, manifest.checkpoints, [cell.key for cell in manifest.cells]]
    return digest(json.dumps(content).encode())[:8]


def runs(directory: Path) -> list[tuple[str, Path]]:
    """Return (id, path of the manifest) for each run into a folder, the newest first."""
    files = (Path(directory) / MANIFESTS).glob("*.json")
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    return [(path.stem, path) for path in newest]


def find_run(directory: Path, start: str) -> str:
    """Return the run's id that begins with ``start``. Raises ResultsError unless exactly one
    does."""
    ids = [name for name, _ in runs(directory)]
    matches = [name for name in ids if start and name.startswith(start)]
    if len(matches) != 1:
        why = f"{len(matches)} runs begin with" if matches else "it has no run"
        raise ResultsError(f"{directory}: {why} {start!r}; it has {', '.join(ids) or 'none'}")
    return matches[0]
