"""Baselines of the gate: per-document outcomes of a grid in one compact Parquet file.

One row a document and metric, all cells below each other: values in thousandths (of a nat, of a
right answer) as packed integers. What the cells were stands in the file's metadata as JSON.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
from pydantic import ValidationError

from qbench.comparison.changes import (
    DECIMALS,
    CellResults,
    Changes,
    ResultSet,
    compare_sets,
    read_results,
)
from qbench.comparison.statistics import Column
from qbench.errors import ResultsError
from qbench.record import Score
from qbench.store import Store, write_atomically

VERSION = 1
METADATA = b"qbench.baseline"


def make(store: Store, out: Path, *, replace: bool = False) -> Changes | None:
    """Write the baseline of a results folder to ``out``.

    Where ``out`` exists, ``replace`` must be set; what replacing it changes is returned, so that
    it can be shown (``tables.changes.changes_table``). Raises ResultsError for a folder with
    missing, failed or unaudited cells, which are no standard to hold anybody to.
    """
    outcomes = read_results(store)
    unfit = [f"{cell}: {why}" for cell, why in outcomes.broken.items()]
    unfit += [f"{cell}: not audited" for cell, one in outcomes.cells.items() if not one.audited]
    if unfit:
        raise ResultsError(f"{store.directory}: no baseline from this: {'; '.join(unfit)}")
    change = difference(store, out) if out.exists() else None
    if change is not None and not replace:
        raise ResultsError(
            f"{out}: exists; look at what would change and give --replace to replace it"
        )
    write(outcomes, out)
    return change


def difference(store: Store, out: Path) -> Changes:
    """What replacing the baseline ``out`` by the results in ``store`` would change."""
    old, new = read(out), read_results(store)
    gone = [f"{cell}: no longer gated" for cell in old.cells.keys() - new.cells.keys()]
    fresh = [f"{cell}: newly gated" for cell in new.cells.keys() - old.cells.keys()]
    return Changes(
        old=str(out),
        new=str(store.directory),
        lines=tuple(compare_sets(old, new)),
        problems=tuple(sorted(gone + fresh)),
    )


def write(outcomes: ResultSet, out: Path) -> None:
    frames = []
    about: dict[str, object] = {}
    for place, (cell, one) in enumerate(outcomes.cells.items()):
        about[cell] = {
            "key": one.key,
            "key_parts": one.key_parts,
            "method": one.method,
            "measures": dict(one.measures),
            "scores": [score.model_dump() for score in one.scores.values()],
        }
        for number, column in enumerate(one.columns[name] for name in one.scores):
            scaled = np.round(column.values * 10**DECIMALS)
            frames.append(
                pd.DataFrame(
                    {
                        "cell": np.int32(place),
                        "score": np.int32(number),
                        "document": column.documents,
                        "value": scaled.astype(np.int64),
                        "weight": column.weights,
                    }
                )
            )
    table = pa.Table.from_pandas(pd.concat(frames, ignore_index=True), preserve_index=False)
    described = {"version": VERSION, "name": outcomes.name, "cells": about}
    table = table.replace_schema_metadata({METADATA: json.dumps(described).encode()})
    payload = io.BytesIO()
    integers = [name for name in ("cell", "score", "document", "value")
                if pa.types.is_integer(table.schema.field(name).type)]  # fmt: skip
    parquet.write_table(
        table,
        payload,
        compression="zstd",
        compression_level=19,
        use_dictionary=["weight"],
        column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
    )
    write_atomically(out, payload.getvalue())


def read(path: Path) -> ResultSet:
    """Read a baseline. Raises ResultsError where it is missing, damaged or of another version."""
    remedy = "make it with `qbench baseline DIR --out FILE`"
    if not path.is_file():
        raise ResultsError(f"{path}: no such baseline; {remedy}")
    try:
        table = parquet.read_table(path)
        about = json.loads((table.schema.metadata or {})[METADATA])
    except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
        raise ResultsError(f"{path}: not a baseline ({type(error).__name__}); {remedy}") from None
    if about.get("version") != VERSION:
        raise ResultsError(
            f"{path}: baseline version {about.get('version')}; this qbench reads {VERSION}; "
            f"{remedy}"
        )
    try:
        return ResultSet(name=about["name"], cells=_cells(about["cells"], table), broken={})
    except (KeyError, TypeError, ValidationError) as error:
        raise ResultsError(f"{path}: not whole ({error!r:.80}); {remedy}") from None


def _cells(about: dict[str, Any], table: pa.Table) -> dict[str, CellResults]:
    groups = dict(list(table.to_pandas().groupby(["cell", "score"], sort=False)))
    cells = {}
    for place, (cell, one) in enumerate(about.items()):
        scores = {(s["task"], s["metric"]): Score.model_validate(s) for s in one["scores"]}
        columns = {}
        for number, name in enumerate(scores):
            rows = groups[place, number]
            values = (rows["value"] / 10**DECIMALS).round(DECIMALS)
            columns[name] = Column.of(rows["document"].to_numpy(), values, rows["weight"])
        cells[cell] = CellResults(
            key=one["key"],
            key_parts=one["key_parts"],
            method=one["method"],
            audited=True,
            measures=one["measures"],
            scores=scores,
            columns=columns,
        )
    return cells
