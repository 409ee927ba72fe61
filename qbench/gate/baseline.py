"""Baselines of the gate: per-document outcomes of a grid in one compact Parquet file.

One row a document and metric, all cells below each other: values in thousandths (of a nat, of a
right answer) as packed integers. What the cells were, and what their audits measured of every
layer, stands in the file's metadata as JSON, with a digest of all of it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from qbench.comparison.changes import CellResults, Changes, ResultSet, compare_sets, read_results
from qbench.errors import ResultsError
from qbench.files import write_atomically
from qbench.gate.layers import Layer, Layers, read_layers
from qbench.records import Precision, Score
from qbench.statistics import Column
from qbench.store import Store

VERSION = 2
METADATA = b"qbench.baseline"
DIGEST = b"qbench.baseline.sha256"
DECIMALS = 3  # of an outcome: a thousandth of a nat, to which results are compared with it
MOST_LAYERS = 2**28  # bytes that the layers may unpack to
COLUMNS = ("cell", "score", "document", "value", "weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What results are held to."""

    outcomes: ResultSet
    layers: dict[str, Layers]


class _Cell(BaseModel):
    model_config = ConfigDict(extra="forbid")
    key: str
    key_parts: dict[str, JsonValue]
    method: str
    measures: dict[str, float]
    scores: tuple[Score, ...]
    documents: dict[str, str]
    precision: Precision = Precision()


class _About(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int
    name: str
    cells: dict[str, _Cell]
    layers: str  # JSON, deflated, in base 85


def make(store: Store, out: Path, *, replace: bool = False) -> Changes | None:
    """Write the baseline of a results folder to ``out``.

    Where ``out`` exists, ``replace`` must be set; what replacing it changes is returned, so that
    it can be shown (``tables.changes.changes_table``). Raises ResultsError for a folder with
    missing, failed or unaudited cells, which are no standard to hold anybody to.
    """
    outcomes = read_results(store, decimals=DECIMALS)
    unfit = [f"{cell}: {why}" for cell, why in outcomes.broken.items()]
    unfit += [f"{cell}: not audited" for cell, one in outcomes.cells.items() if not one.audited]
    if unfit:
        raise ResultsError(f"{store.name}: no baseline from this: {'; '.join(unfit)}")
    if not outcomes.cells:
        raise ResultsError(f"{store.name}: no baseline can be made: it has no cells")
    if out.exists() and not replace:
        raise ResultsError(f"{out}: exists already; look at the changes, then add --replace")
    change = difference(store, out) if out.exists() else None
    write(Baseline(outcomes=outcomes, layers=read_layers(store)), out)
    return change


def difference(store: Store, out: Path) -> Changes:
    """What replacing the baseline ``out`` by the results in ``store`` would change. Where ``out``
    cannot be read or is of other data, the problems say so."""
    new = read_results(store, decimals=DECIMALS)
    try:
        old = read(out).outcomes
        lines = tuple(compare_sets(old, new))
    except ResultsError as error:
        told = f"nothing to compare with: {error}"
        return Changes(old=str(out), new=store.name, lines=(), problems=(told,))
    gone = [f"{cell}: no longer gated" for cell in old.cells.keys() - new.cells.keys()]
    fresh = [f"{cell}: newly gated" for cell in new.cells.keys() - old.cells.keys()]
    return Changes(
        old=str(out),
        new=store.name,
        lines=lines,
        problems=tuple(sorted(gone + fresh)),
    )


def write(baseline: Baseline, out: Path) -> None:
    outcomes = baseline.outcomes
    frames = [
        pd.DataFrame(
            {
                "cell": np.int32(index),
                "score": np.int32(number),
                "document": column.documents,
                "value": np.round(column.values * 10**DECIMALS).astype(np.int64),
                "weight": column.weights,
            }
        )
        for index, one in enumerate(outcomes.cells.values())
        for number, column in enumerate(one.columns[name] for name in one.scores)
    ]
    about = _About(
        version=VERSION,
        name=outcomes.name,
        cells={
            cell: _Cell(scores=tuple(one.scores.values()), **_in_common(one))
            for cell, one in outcomes.cells.items()
        },
        layers=_packed({cell: baseline.layers.get(cell, {}) for cell in outcomes.cells}),
    )
    described = json.dumps(about.model_dump(mode="json")).encode()
    table = pa.Table.from_pandas(pd.concat(frames, ignore_index=True), preserve_index=False)
    table = table.replace_schema_metadata(None)
    payload = io.BytesIO()
    integers = [name for name in ("cell", "score", "document", "value")
                if pa.types.is_integer(table.schema.field(name).type)]  # fmt: skip
    with parquet.ParquetWriter(
        payload,
        table.schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=["weight"],
        column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({METADATA: described, DIGEST: _digest(described, table)})
    write_atomically(out, payload.getvalue())


def read(path: Path) -> Baseline:
    """Read a baseline. Raises ResultsError where it is missing, damaged or of another version."""
    remedy = "make it with `qbench baseline DIR --out FILE`"
    if not path.is_file():
        raise ResultsError(f"{path}: no such baseline; {remedy}")
    try:
        file = parquet.ParquetFile(path)
        table, stated = file.read(), file.metadata.metadata or {}
        described = stated[METADATA]
        about = json.loads(described)
    except (pa.ArrowException, OSError, KeyError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: not a baseline ({type(error).__name__}); {remedy}") from None
    version = about.get("version") if isinstance(about, dict) else None
    if version != VERSION:
        if type(version) is int and version > VERSION:
            remedy = "a newer qbench wrote it: update qbench"
        raise ResultsError(
            f"{path}: baseline version {version}; this qbench reads {VERSION}; {remedy}"
        )
    try:
        if stated[DIGEST].decode() != _digest(described, table):
            raise ResultsError(f"{path}: damaged: its digest is not that of its content; {remedy}")
        found = _About.model_validate(about)
        return Baseline(
            outcomes=ResultSet(name=found.name, cells=_cells(found.cells, table), broken={}),
            layers=_unpacked(found.layers),
        )
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ResultsError(
            f"{path}: incomplete ({where}: {error.errors()[0]['msg']}); {remedy}"
        ) from None
    except (KeyError, ValueError, TypeError, zlib.error, pa.ArrowException) as error:
        raise ResultsError(f"{path}: incomplete ({error!r:.80}); {remedy}") from None


def _in_common(one: CellResults | _Cell) -> dict[str, Any]:
    """What a cell of results and one of a baseline have in common."""
    return {name: getattr(one, name) for name in _Cell.model_fields if name != "scores"}


def _digest(described: bytes, table: pa.Table) -> str:
    """SHA-256 of the description and of every column's values."""
    found = hashlib.sha256(described)
    for name in COLUMNS:
        values = table.column(name).to_numpy()
        texts = values.dtype == object
        found.update("\n".join(map(str, values)).encode() if texts else values.tobytes())
    return found.hexdigest()


def _packed(layers: dict[str, Layers]) -> str:
    """Names once for all cells that have the same, measures to six digits."""
    names: list[list[str]] = []
    cells: dict[str, dict[str, Any]] = {}
    for cell, found in layers.items():
        if (own := list(found)) not in names:
            names.append(own)
        cells[cell] = {
            "names": names.index(own),
            "rows": [
                [_rounded(one.error), _rounded(one.gain), one.levels, _rounded(one.bits),
                 one.digest]
                for one in found.values()
            ],
        }  # fmt: skip
    text = json.dumps({"names": names, "cells": cells}, separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


_ROW = TypeAdapter(tuple[float, float | None, int, float, str])


def _unpacked(text: str) -> dict[str, Layers]:
    unpacking = zlib.decompressobj()
    whole = unpacking.decompress(base64.b85decode(text), MOST_LAYERS)
    if unpacking.unconsumed_tail:
        raise ValueError("layers of more than 256 MiB")
    about = json.loads(whole)
    layers: dict[str, Layers] = {}
    for cell, found in about["cells"].items():
        rows = (_ROW.validate_python(row) for row in found["rows"])
        layers[cell] = {
            name: Layer(error=error, gain=gain, levels=levels, bits=bits, digest=digest)
            for name, (error, gain, levels, bits, digest) in zip(
                about["names"][found["names"]], rows, strict=True
            )
        }
    return layers


def _cells(about: dict[str, _Cell], table: pa.Table) -> dict[str, CellResults]:
    groups = dict(list(table.to_pandas().groupby(["cell", "score"], sort=False)))
    cells = {}
    for index, (cell, one) in enumerate(about.items()):
        scores = {(score.task, score.metric): score for score in one.scores}
        columns = {}
        for number, name in enumerate(scores):
            rows = groups[index, number]
            values = (rows["value"] / 10**DECIMALS).round(DECIMALS)
            columns[name] = Column.of(rows["document"].to_numpy(), values, rows["weight"])
        cells[cell] = CellResults(audited=True, scores=scores, columns=columns, **_in_common(one))
    return cells
