"""Baselines of the gate: a grid's records with their per-document outcomes, in one Parquet file.

One row a document and metric, all cells below each other: values in thousandths (of a nat, of a
right answer) as packed integers. The records stand in the file's metadata as deflated JSON, with a
digest of all of it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
from pydantic import TypeAdapter, ValidationError

from qbench.comparison.changes import CellResults, Changes, ResultSet, compare_sets, read_results
from qbench.errors import ResultsError, first_line, validation_line
from qbench.files import write_atomically
from qbench.records import Record
from qbench.statistics import TESTABLE, Column
from qbench.store import Store
from qbench.text import group_by_reason

VERSION = 3
ABOUT, DIGEST = b"qbench.baseline", b"qbench.baseline.sha256"
DECIMALS = 3  # of an outcome: a thousandth of a nat, to which results are compared with it
PARQUET = b"PAR1"  # how each of its files begins
INTEGERS = ("cell", "score", "document", "value")


def make(store: Store, out: Path, *, replace: bool = False) -> Changes | None:
    """Write the baseline of a results folder to ``out``.

    Where ``out`` exists, ``replace`` must be set; what replacing it changes is returned, so that
    it can be shown (``tables.changes.changes_table``). Raises ResultsError for a folder with
    missing, failed or unaudited cells, failed tasks or scores that are not finite, which are no
    standard to hold anybody to, and for another kind of file in its place.
    """
    results = read_results(store, decimals=DECIMALS)
    unfit = [*results.broken.items()]
    for cell, one in results.cells.items():
        unfit += [(cell, "not audited")] * (one.record.audit is None)
        unfit += [(cell, f"{task} failed: {why}") for task, why in one.record.failed_tasks.items()]
        unfit += [
            (cell, f"{score.task} {score.metric} is {score.value}")
            for score in one.scores.values()
            if not math.isfinite(score.value)
        ]
    if unfit:
        raise ResultsError(
            f"{store.name}: no baseline from this: {'; '.join(group_by_reason(unfit))}"
        )
    if out.exists() and not replace:
        raise ResultsError(f"{out}: exists already; look at the changes, then add --replace")
    if out.exists() and out.read_bytes()[: len(PARQUET)] != PARQUET:
        raise ResultsError(f"{out}: not a baseline; name another file")
    change = difference(store.name, results, out) if out.exists() else None
    write(results, out)
    return change


def difference(name: str, new: ResultSet, out: Path) -> Changes:
    """What replacing the baseline ``out`` by the results ``new`` would change. Where ``out`` cannot
    be read or is of other data, the problems say so."""
    try:
        old = read(out)
        lines = tuple(compare_sets(old, new))
    except ResultsError as error:
        told = f"nothing to compare with: {error}"
        return Changes(old=str(out), new=name, lines=(), problems=(told,))
    gone = [f"{cell}: no longer gated" for cell in old.cells if cell not in new.cells]
    fresh = [f"{cell}: newly gated" for cell in new.cells if cell not in old.cells]
    return Changes(old=str(out), new=name, lines=lines, problems=(*gone, *fresh))


def write(results: ResultSet, out: Path) -> None:
    frames = [
        pd.DataFrame(
            {
                "cell": np.full(len(column.documents), index, np.int32),
                "score": np.full(len(column.documents), number, np.int32),
                "document": column.documents,
                "value": np.round(column.values * 10**DECIMALS).astype(np.int64),
                "weight": column.weights,
            }
        )
        for index, one in enumerate(results.cells.values())
        for number, score in enumerate(one.record.scores)
        for column in [one.columns.get((score.task, score.metric))]
        if column is not None
    ]
    table = pa.Table.from_pandas(pd.concat(frames, ignore_index=True), preserve_index=False)
    records = [one.record.model_dump(mode="json") for one in results.cells.values()]
    packed = base64.b85encode(zlib.compress(json.dumps(records).encode(), 9)).decode()
    about = json.dumps({"version": VERSION, "name": results.name, "records": packed}).encode()
    payload = io.BytesIO()
    with parquet.ParquetWriter(
        payload,
        table.schema.remove_metadata(),
        compression="zstd",
        compression_level=19,
        use_dictionary=["weight"],
        column_encoding=dict.fromkeys(INTEGERS, "DELTA_BINARY_PACKED"),
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({ABOUT: about, DIGEST: _digest(about, table)})
    write_atomically(out, payload.getvalue())


def read(path: Path) -> ResultSet:
    """Read a baseline. Raises ResultsError where it is missing, damaged or of another version."""
    remedy = "make it with `qbench baseline DIR --out FILE`"
    if not path.is_file():
        raise ResultsError(f"{path}: no such baseline; {remedy}")
    try:
        table = parquet.ParquetFile(path).read()
        stated = table.schema.metadata or {}
        about = json.loads(stated[ABOUT])
    except (pa.ArrowException, OSError, KeyError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: not a baseline ({type(error).__name__}); {remedy}") from None
    version = about.get("version") if isinstance(about, dict) else None
    if version != VERSION:
        if type(version) is int and version > VERSION:
            remedy = "a newer qbench wrote it: update qbench"
        raise ResultsError(
            f"{path}: baseline version {version}; this qbench reads {VERSION}; {remedy}"
        )
    if stated.get(DIGEST) != _digest(stated[ABOUT], table):
        raise ResultsError(f"{path}: damaged: its digest is not that of its content; {remedy}")
    try:
        return ResultSet(name=about["name"], cells=_cells(about["records"], table), broken={})
    except ValidationError as error:
        why = validation_line(error)
    except (LookupError, ValueError, TypeError, zlib.error, pa.ArrowException) as error:
        why = first_line(error)
    raise ResultsError(f"{path}: incomplete ({why}); {remedy}")


def _digest(about: bytes, table: pa.Table) -> bytes:
    """SHA-256 of the description and of every column's values."""
    found = hashlib.sha256(about)
    for column in table.columns:
        found.update(column.to_numpy().tobytes())
    return found.hexdigest().encode()


def _cells(packed: str, table: pa.Table) -> dict[str, CellResults]:
    text = zlib.decompress(base64.b85decode(packed))
    records = TypeAdapter(list[Record]).validate_json(text)
    columns: dict[int, dict[tuple[str, str], Column]] = defaultdict(dict)
    for (cell, number), rows in table.to_pandas().groupby(["cell", "score"], sort=False):
        score, values = records[cell].scores[number], rows["value"] / 10**DECIMALS
        columns[cell][score.task, score.metric] = Column.of(
            rows["document"], values.round(DECIMALS), rows["weight"]
        )
    for index, one in enumerate(records):
        if index not in columns and any(score.aggregation in TESTABLE for score in one.scores):
            raise ValueError(f"{one.cell} has no outcomes")
    return {one.cell: CellResults.of(one, columns[index]) for index, one in enumerate(records)}
