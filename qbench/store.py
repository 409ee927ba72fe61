"""Read and write the records of a results folder, its archive, and the cache that later runs take
results from, all verified by checksum. Imports no torch. docs/records.md lists the files of a
results folder; an analysis has the same layout in its folder ``analysis``, sensitivities in
``analysis/sensitivity``.

A folder of results that holds symbolic links is refused: commands that only show a stranger's
results write tables into their folder, and must not write elsewhere.

The cache keeps results of runs for later runs, each under its content key. Any part of it may be
deleted while no run is at work; the run that needs it makes it again:

    CACHE/artifacts/<weights16>/<config>-<key16>/             quantized weights
    CACHE/distributions/<key16>.safetensors                   hidden states that measure damage
    CACHE/tasks/<key16>.json, <key16>.….parquet               finished tasks of a cell, with tables
    CACHE/budget/<key16>.json                                 costs of layers (`qbench budget`)
    CACHE/digests/<key16>.json                                of large files, with their identity
    CACHE/sources/<key16>.json                                where a run read its tasks

A record carries its own checksum and those of its Parquet files, whose names begin with theirs.
It is written last: a record that can be read is complete, and one that is being replaced stays
complete until the new one is written. Names and contents of all files of an archive are checked
before the first is written.
"""

from __future__ import annotations

import io
import lzma
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from filelock import FileLock
from pydantic import TypeAdapter

from qbench.errors import DamagedError, NewerSchemaError, OutputError, ResultsError
from qbench.files import (
    NAME,
    clean_temporaries,
    content_key,
    digest,
    file_digest,
    replacing,
    require_folder,
    verify_tensors,
    write_atomically,
)
from qbench.records import (
    ANSWER_COLUMNS,
    DIVERGENCE_COLUMNS,
    KEY_DIGITS,
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
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


MANIFEST = "grid.json"
ARCHIVE = "records.tar.xz"
UNPACKED = ".unpacked"  # holds the SHA-256 of the archive that was unpacked last
WRITTEN = (
    "records", "analysis", "export", MANIFEST, ARCHIVE, UNPACKED, ".lock", "tables.md",
    "tables.csv", "tables.tex", "recipe.yaml", "budget.json", "budget.svg",
)  # fmt: skip
PACKED = re.compile(rf"grid\.json|(records|analysis)(/{NAME})+\.(json|parquet)")
FETCH_AGAIN = "fetch it again"
MOST_RATIO, LEAST_BOUND = 100, 2**26  # bytes per byte of an archive, or in all, that it may hold
XZ_MAGIC = b"\xfd7zXZ\0"  # how an archive begins
# Tables hold numbers split into bytes: neither the byte before nor the place tells much of one.
XZ = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "pb": 0}


def pack(folder: Path, paths: Iterable[Path], out: Path) -> None:
    """Write those of ``paths`` that are results files of ``folder`` to the archive ``out``, which
    is replaced. Other paths are left out.

    The same files give the same bytes.
    """
    ordered = sorted(paths, key=lambda path: (path.suffixes[-2:], path))
    with (
        replacing(out) as made,
        lzma.open(made, "wb", filters=[XZ]) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for path in ordered:
            name = path.relative_to(folder).as_posix()
            if PACKED.fullmatch(name):
                payload = path.read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(payload)
                archive.addfile(member, io.BytesIO(payload))


def unpack(folder: Path) -> None:
    """Write the files of ``folder/records.tar.xz``, if any, into ``folder``, once per archive.

    Records of other keys stay; a printed line says if a manifest is replaced. Raises DamagedError
    if the archive is damaged, OutputError if the folder cannot be written.
    """
    archive, mark, manifest = (folder / name for name in (ARCHIVE, UNPACKED, MANIFEST))
    if not archive.is_file():
        return
    current = file_digest(archive).encode()

    def is_unpacked() -> bool:
        return manifest.exists() and mark.is_file() and mark.read_bytes() == current

    if is_unpacked():
        return
    require_folder(folder)
    with FileLock(folder / ".lock"):
        if is_unpacked():  # another process did it meanwhile
            return
        if manifest.exists() and mark.is_file():
            line = "newer than the results beside it, which it replaces; other records stay"
            print(f"{archive}: {line}", file=sys.stderr)
        extract(archive, folder)
        write_atomically(mark, current)


def require_no_links(folder: Path) -> None:
    """Raise ResultsError if something that qbench writes in ``folder`` is a symbolic link."""
    for part in (folder / name for name in WRITTEN):
        for path in (part, *part.rglob("*")):
            if path.is_symlink():
                raise ResultsError(f"{path}: a symbolic link; put the file itself there")


def extract(archive: Path, folder: Path, remedy: str = FETCH_AGAIN) -> None:
    """Write the results files of the archive into ``folder``, ``grid.json`` last, so that an
    interrupted unpacking begins again. Other names, links and special files are left out.

    Raises DamagedError, before the first file is written, for a damaged archive, one that unpacks
    to too much, and for a file that qbench does not write so; ``remedy`` ends the message.
    """
    contents: dict[str, bytes] = {}
    left = max(LEAST_BOUND, MOST_RATIO * archive.stat().st_size)
    try:
        with lzma.open(archive) as file:
            with tarfile.open(fileobj=file, mode="r|") as packed:
                for member in packed:
                    name, left = member.name, left - tarfile.BLOCKSIZE - member.size
                    if left < 0:
                        raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size")
                    if member.isreg() and PACKED.fullmatch(name):
                        contents[name] = packed.extractfile(member).read()  # type: ignore[union-attr]  # regular
            while file.read(tarfile.RECORDSIZE):  # to the end, where the checksum is
                pass
        for name, content in contents.items():
            if name.endswith(".json"):
                read_record(Path(f"{archive}: {name}"), _kind(name), remedy, content)
            elif f".{digest(content)[:KEY_DIGITS]}." not in name:
                raise ValueError(f"{name} does not match its checksum")
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError, OverflowError) as error:
        raise DamagedError(f"{archive}: damaged: {error}; {remedy}") from None
    for name in sorted(contents, key=lambda name: name == MANIFEST):
        path = folder / name
        if not (path.is_file() and path.read_bytes() == contents[name]):
            write_atomically(path, contents[name])


def _kind(name: str) -> type[RecordModel]:
    """Return the type of the record in the results file ``name``."""
    folder, _, rest = name.partition("/")
    if not rest:
        return RunManifest
    if folder == "records":
        return Record
    if name.endswith(f"/{MANIFEST}"):
        return AnalysisManifest
    return Sensitivity if rest.startswith(f"{SENSITIVITY}/") else Analysis


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

    kind: type[R]
    part, cells = "", ""  # folder of the manifest, and that of the records within it
    by_cell = True  # whether a record's path has the cell's name
    manifest_kind: type[RunManifest | AnalysisManifest] = RunManifest
    remedy, written_by = RUN_AGAIN, "qbench run"

    def __init__(self, root: Path, *, manifest: RunManifest | None = None) -> None:
        """``root`` is the results folder, or the cache; its archive is unpacked. ``manifest``
        replaces that of its last run. Raises ResultsError if the folder holds symbolic links."""
        require_no_links(Path(root))
        self._manifest = manifest
        self._layouts: dict[str, tuple[list, Any]] = {}  # of the table read last, see ``_parsed``
        self.directory = Path(root) / self.part
        unpack(Path(root))

    def has_manifest(self) -> bool:
        """Return whether the folder has a manifest of its own; a given one does not count."""
        return (self.directory / MANIFEST).is_file()

    def manifest(self) -> Any:
        """Return the manifest of the last run, or the given one. Raises ResultsError if there is
        none, or it is damaged or written by another version of qbench."""
        if self._manifest is not None:
            return self._manifest
        if not self.has_manifest():
            raise ResultsError(
                f"{self.directory}: no grid.json here; name a folder that `{self.written_by}` wrote"
            )
        return read_record(self.directory / MANIFEST, self.manifest_kind, self.remedy)

    def manifest_before(self, log: LogLine | None = None) -> Any:
        """Return the manifest that a new run replaces; None if there is none or it cannot be read,
        after calling ``log`` with the reason. Raises NewerSchemaError for the manifest of a newer
        qbench, which must not be replaced."""
        try:
            return self.manifest() if self.has_manifest() else None
        except NewerSchemaError:
            raise
        except ResultsError as error:
            if log is not None:
                log(str(error))
            return None

    def put_manifest(self, manifest: Any, log: LogLine | None = None) -> Any:
        """Write ``manifest``; return the one that it replaces: None if there was none or it was
        damaged (``log`` says so). Raises NewerSchemaError, before writing, if a newer qbench wrote
        it. Also remove what killed processes left in the folder."""
        with FileLock(self.directory / ".lock"):  # makes the folder
            before = self.manifest_before(log)
            clean_temporaries(self.directory)
            write_record(self.directory / MANIFEST, manifest)
        return before

    def get(self, cell: CellKey) -> R | None:
        """Return the record of ``cell``, finished or failed; None if there is none.

        Raises DamagedError if the file was changed, is another cell's or an older qbench's,
        NewerSchemaError if a newer one wrote it.
        """
        path = self.path(cell)
        if not path.is_file():
            return None
        record = read_record(path, self.kind, self.remedy)
        if record.key != cell.key or self.path(record) != path:
            raise DamagedError(f"{path}: belongs to another cell or key; {self.remedy}")
        return record

    def get_valid(self, cell: CellKey, log: LogLine | None = None) -> R | None:
        """Return the record of ``cell`` if it and its tables are intact, else None.

        For callers that can compute the record again: ``log`` is called with the damage. Raises
        NewerSchemaError for a record of a newer qbench, which must not be replaced.
        """
        try:
            record = self.get(cell)
            for name in getattr(record, "files", ()):
                self.payload(record, name)
            return record
        except NewerSchemaError:
            raise
        except ResultsError as error:
            if log is not None:
                log(f"{cell.cell}: made again: {str(error).removesuffix(f'; {self.remedy}')}")
            return None

    def records(self) -> list[R]:
        """Return the records of the manifest's cells in its order, missing ones left out. Raises as
        ``manifest`` and ``get``."""
        records = (self.get(cell) for cell in self.manifest().cells)
        return [record for record in records if record is not None]

    def path(self, cell: CellKey, suffix: str = ".json") -> Path:
        """Return the path of a cell's record, or of a file beside it with this ``suffix``."""
        folder = self.directory / self.cells / (cell.cell if self.by_cell else "")
        return folder / f"{cell.key[:KEY_DIGITS]}{suffix}"

    def put(self, record: R, *tables: pd.DataFrame | None, **by_name: pd.DataFrame | None) -> R:
        """Write a record and its tables, in the order of ``COLUMNS`` or by name there, each with
        these columns (else AssertionError); return the record with the tables' checksums.

        The record is written last. Tables of this record that are not passed are deleted.
        """
        payloads = {
            name: _parquet(table, COLUMNS[name])
            for name, table in (dict(zip(COLUMNS, tables, strict=False)) | by_name).items()
            if table is not None
        }
        if hasattr(record, "files"):
            files = {
                name: StoredTable(sha256=digest(payload), bytes=len(payload))
                for name, payload in payloads.items()
            }
            record = record.model_copy(update={"files": files})
        path = self.path(record)
        with FileLock(self.directory / ".lock"):
            for name, payload in payloads.items():
                write_atomically(self._table_path(record, name), payload)
            write_record(path, record)
            kept = {self._table_path(record, name) for name in payloads}
            for old in {*path.parent.glob(f"{path.stem}.*.*.parquet")} - kept:
                old.unlink()
        return record

    def outcome_arrays(self, record: Record) -> dict[tuple[str, str], tuple[np.ndarray, ...]]:
        """Return (task, metric) → document, value and weight, arrays [documents] in the order of
        the documents, scores in that of the file: five times as fast as ``table``. Records with the
        same documents and weights share these arrays. Raises DamagedError as ``table`` does."""
        fixed = ["task", "metric", "document", "weight"]
        values, scores = self._parsed(record, "outcomes", "value", fixed, _by_score)
        if scores is None:
            raise self._listed_twice(record)
        return {name: (documents, values[rows], weights)
                for name, (rows, documents, weights) in scores.items()}  # fmt: skip

    def divergence_arrays(self, record: Record) -> tuple[np.ndarray, ...]:
        """Return the sorted names of documents ("task document"), and for each row of the table of
        divergences the index of its document, KL divergence and number of scored tokens (NaN if
        unknown): ten times as fast as ``table``. Raises DamagedError as ``table`` does."""
        fixed = ["task", "document", "tokens"]
        kl, (names, index, tokens) = self._parsed(record, "divergences", "kl", fixed, _by_document)
        return names, index, kl, tokens

    def _parsed(
        self, record: Record, name: Table, column: str, fixed: list[str], parse: Callable
    ) -> tuple[np.ndarray, Any]:
        """Return ``column`` of a table of ``record`` as an array of floats, and what ``parse``
        returns for the table's columns ``fixed``. It is called once for tables in a row in which
        these have the same bytes, as in most cells of a folder."""
        file, payload = self._file(record, name, read_dictionary=fixed[:2])
        parts = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        chunks = (part.column(i) for part in parts for i in range(part.num_columns))
        raw = [file.schema, len(parts)]
        for chunk in chunks:
            if chunk.path_in_schema in fixed:
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                raw += [chunk.compression, payload[start : start + chunk.total_compressed_size]]
        before, parsed = self._layouts.get(name, (None, None))
        if raw != before:
            parsed = parse(file.read(fixed, use_threads=False).unify_dictionaries())
            self._layouts[name] = raw, parsed
        numbers = _numbers(file.read([column], use_threads=False)[column])
        return numbers.astype(float), parsed  # a copy: pyarrow uses its memory again

    def _listed_twice(self, record: Record) -> DamagedError:
        """Return the error for a table that lists a document twice."""
        path = self._table_path(record, "outcomes")
        return DamagedError(f"{path}: damaged: it lists a document twice; {RUN_AGAIN}")

    def table(self, record: Record, name: Table) -> pd.DataFrame:
        """Return a table of ``record`` with the columns ``COLUMNS[name]``. Raises DamagedError if
        the file is missing or changed, or lists a document of a metric twice."""
        file, _ = self._file(record, name)
        table = file.read(use_threads=False).to_pandas(use_threads=False)
        if name == "outcomes" and table.duplicated(["task", "metric", "document"]).any():
            raise self._listed_twice(record)
        return table

    outcomes = partialmethod(table, name="outcomes")
    responses = partialmethod(table, name="responses")
    divergences = partialmethod(table, name="divergences")
    answers = partialmethod(table, name="answers")

    def _file(self, record: Record, name: Table, **options: Any) -> tuple[Any, bytes]:
        """Return a table of ``record`` as pyarrow's ParquetFile, and its bytes."""
        import pyarrow
        from pyarrow import parquet

        # without threads: if there is no memory for one, pyarrow waits for it for ever
        payload = self.payload(record, name)
        file = parquet.ParquetFile(pyarrow.BufferReader(payload), pre_buffer=False, **options)
        return file, payload

    def payload(self, record: Record, name: Table) -> bytes:
        """Return the bytes of a table of ``record``, a Parquet file, verified before a library
        parses them. Raises DamagedError if the record has no such table, or if the file is missing
        or changed."""
        if name not in record.files:
            path = self.path(record)
            raise DamagedError(f"{path}: no {name} were written with this record; {RUN_AGAIN}")
        path, stored = self._table_path(record, name), record.files[name]
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            raise DamagedError(f"{path}: missing; {RUN_AGAIN}") from None
        if len(payload) != stored.bytes or digest(payload) != stored.sha256:
            raise DamagedError(f"{path}: damaged: it does not match its checksum; {RUN_AGAIN}")
        return payload

    def _table_path(self, record: Record, name: Table) -> Path:
        """Return the path of a table. Its checksum is part of the name, so that a new table never
        replaces a table of the old record."""
        return self.path(record, f".{record.files[name].sha256[:KEY_DIGITS]}.{name}.parquet")


def _numbers(column: Any) -> np.ndarray:
    """Return the numbers of pyarrow's ``column``, NaN for those that it lacks. Only then pyarrow
    imports pandas, which takes half a second."""
    import numpy as np

    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array.to_numpy(zero_copy_only=False) if array.null_count else np.from_dlpack(array)


def _codes(column: Any) -> tuple[np.ndarray, list[str]]:
    """Return the texts of pyarrow's ``column`` as indices of the list of different texts."""
    import numpy as np

    if not len(column):
        return np.zeros(0, int), []
    column = column.combine_chunks()
    return np.from_dlpack(column.indices).astype(int), column.dictionary.to_pylist()


def _by_score(table: Any) -> dict[tuple[str, str], tuple] | None:
    """Return (task, metric) → the rows of a table of outcomes, their documents, in order, and their
    weights; None if a document is listed twice."""
    import numpy as np

    (of_task, tasks), (of_metric, metrics) = (_codes(table[name]) for name in ("task", "metric"))
    document, weight = _numbers(table["document"]), _numbers(table["weight"]).astype(float)
    codes = of_task * len(metrics) + of_metric
    order, scores = np.lexsort((document, codes)), {}
    groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    for rows in sorted(groups, key=np.min):
        if (np.diff(rows) == 1).all():  # one after the other: nothing is copied
            rows = slice(rows[0], rows[-1] + 1)
        documents = document[rows]
        if not np.diff(documents).all():
            return None
        task, metric = divmod(int(codes[rows][0]), len(metrics))
        scores[tasks[task], metrics[metric]] = (rows, documents, weight[rows])
    return scores


def _by_document(table: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sorted names "task document" of a table of divergences, and for each row the index
    of its document and the number of its tokens."""
    import numpy as np

    codes, tasks = _codes(table["task"])
    documents = _numbers(table["document"]).tolist()
    rows = zip(codes.tolist(), documents, strict=True)
    names = np.array([f"{tasks[code]} {document}" for code, document in rows], dtype=str)
    return *np.unique(names, return_inverse=True), _numbers(table["tokens"]).astype(float)


class Analyses(Records[R]):
    """The analyses of one results folder."""

    kind, part = Analysis, "analysis"
    manifest_kind = AnalysisManifest
    remedy, written_by = "run `qbench analyze` again", "qbench analyze"

    def records(self) -> list[R]:
        """Return the analyses of the manifest's cells; an empty list if nothing was analyzed."""
        return super().records() if self.has_manifest() else []


SENSITIVITY = "sensitivity"


class Sensitivities(Analyses[Sensitivity]):
    """The sensitivity of layers to a quantizer, in one results folder."""

    kind, part = Sensitivity, f"analysis/{SENSITIVITY}"


class Store(Records[Record]):
    """The records of one results folder, with their tables."""

    kind, cells = Record, "records"


class TaskStore(Records[TaskRecord]):
    """Finished tasks under their :func:`task_key` alone, whatever their cells are called, in the
    folder ``cache``."""

    kind, part, by_cell = TaskRecord, "tasks", False


def _parquet(table: pd.DataFrame, columns: tuple[str, ...]) -> bytes:
    """Return ``table`` as a Parquet file. Numbers are stored as differences or split into bytes,
    which takes half the space of zstd without that."""
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


# --- the cache: results of runs for later runs, each under its content key


def task_key(
    parts: Mapping[str, Any], task: str, base_parts: Mapping[str, Any] | None = None
) -> str:
    """Return the key of one ``task`` of the cell with the key parts ``parts``; it does not depend
    on the cell's other tasks. ``base_parts``: those of the unquantized cell that damage is measured
    against, None without damage."""
    left_out = ("groups", "damage against")
    single = {name: part for name, part in parts.items() if name not in left_out}
    for name in ("tasks", "few-shot"):
        single[name] = {task: parts[name][task]}
    if base_parts is not None:
        single["damage against"] = task_key(base_parts, task)
    return content_key(single)


def head_key(parts: Mapping[str, Any]) -> str:
    """Return the key under which the cell with the key ``parts`` keeps its LM head, the same for
    all of its tasks."""
    left_out = ("groups", "damage against", "tasks", "few-shot", "scoring")
    return content_key({name: part for name, part in parts.items() if name not in left_out})


@dataclass(frozen=True, slots=True)
class Sources:
    """Holds the files that a run read on this machine: folders of tasks (None: the hub's data,
    lm-eval's definitions), calibration text, and checkpoints by name."""

    data: Path | None = None
    definitions: Path | None = None
    calibration: Path | None = None
    checkpoints: dict[str, Path] = field(default_factory=dict)


def keep_sources(cache: Path, manifest: RunManifest, sources: Sources) -> None:
    """Remember the ``sources`` of the run with this manifest, for ``qbench view`` and ``qbench
    export``; if the cache cannot be written, both need --data and --definitions.

    They are not in the results: those may come from another person, and definitions may hold code.
    """
    with suppress(OutputError):
        write_atomically(_sources_file(cache, manifest), TypeAdapter(Sources).dump_json(sources))


def find_sources(cache: Path, manifest: RunManifest) -> Sources:
    """Return the sources that :func:`keep_sources` remembered of a run with the cells of
    ``manifest``; empty ones if the run was on another machine, or if they are no longer in the
    cache."""
    with suppress(OSError, ValueError):
        return TypeAdapter(Sources).validate_json(_sources_file(cache, manifest).read_bytes())
    return Sources()


def _sources_file(cache: Path, manifest: RunManifest) -> Path:
    """Return the path of the file of the sources of runs with the cells of ``manifest``."""
    key = content_key({"cells": [cell.key for cell in manifest.cells]})
    return cache / "sources" / f"{key[:KEY_DIGITS]}.json"


# --- hidden states of unquantized cells, which damage is measured against: a file per task with
# those of its scored tokens, and one with the LM head under a key without tasks; beside each its
# digest. ``evaluation.kl_observer`` says what is in them.

REMEDY = "run again without --only: the unquantized cell is then made anew"


def baseline_file(cache: Path, key: str) -> Path:
    """Return the path in the ``cache`` of a task's hidden states, or the LM head, under ``key``."""
    return cache / "distributions" / f"{key[:KEY_DIGITS]}.safetensors"


def baseline_files(cache: Path, parts: Mapping[str, Any], tasks: Iterable[str]) -> dict[Path, str]:
    """Return path → key of the hidden states of ``tasks`` and of the LM head, for the unquantized
    cell with the key parts ``parts``."""
    keys = [head_key(parts), *(task_key(parts, task) for task in tasks)]
    return {baseline_file(cache, key): key for key in keys}


def verify_baseline(path: Path, key: str) -> None:
    """Read the whole file and compare it with its digest and ``key``. Raises ResultsError if it is
    missing, changed, or under another key."""
    try:
        about = verify_tensors(path)
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: {error}; {REMEDY}") from error
    if about.get("key") != key:
        raise ResultsError(f"{path}: belongs to another key than {key[:KEY_DIGITS]}; {REMEDY}")
