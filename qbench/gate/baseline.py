"""Baselines of the gate: a run's records with their per-document outcomes, as a results archive.

A results folder, or its ``records.tar.xz``, is a baseline too.
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

from qbench.comparison.changes import Changes, ResultSet, compare_sets, read_results, rounded
from qbench.errors import ResultsError
from qbench.store import XZ_MAGIC, Store, extract, pack
from qbench.text import group_by_reason

DECIMALS = 3  # of an outcome: a thousandth of a nat, to which results are compared with it
EARLIER = b"PAR1"  # how a baseline of an earlier version begins
REMEDY = "make it with `qbench baseline DIR --out FILE`"


def make(store: Store, out: Path, *, replace: bool = False) -> Changes | None:
    """Write the baseline of a results folder to the file ``out``.

    Returns what replacing an existing baseline changes, which needs ``replace``; else None. Raises
    ResultsError if a cell is missing, failed or unaudited, a task failed or a score is not finite,
    and if ``out`` is a file of another kind.
    """
    results = read_results(store, decimals=DECIMALS)
    unfit = [*results.broken.items()]
    for cell, scored in results.cells.items():
        unfit += [(cell, "not audited")] * (scored.record.audit is None)
        unfit += [
            (cell, f"{task} failed: {why}") for task, why in scored.record.failed_tasks.items()
        ]
        unfit += [
            (cell, f"{score.task} {score.metric} is {score.value}")
            for score in scored.scores.values()
            if not math.isfinite(score.value)
        ]
    if unfit:
        reasons = "; ".join(group_by_reason(unfit))
        raise ResultsError(f"{store.directory}: no baseline from this: {reasons}")
    if out.exists() and not replace:
        raise ResultsError(f"{out}: exists already; look at the changes, then add --replace")
    if out.exists() and not out.read_bytes().startswith((XZ_MAGIC, EARLIER)):
        raise ResultsError(f"{out}: not a baseline; name another file")
    change = difference(str(store.directory), results, out) if out.exists() else None
    with TemporaryDirectory() as folder:
        copy = Store(Path(folder))
        for scored in results.cells.values():
            outcomes = store.outcomes(scored.record)
            values = outcomes.groupby("metric")["value"]
            outcomes["value"] = values.transform(lambda v: rounded(v.to_numpy(), v.name, DECIMALS))
            copy.put(scored.record, outcomes)
        copy.put_manifest(store.manifest())
        pack(copy.directory, copy.directory.rglob("*"), out)
    return change


def difference(name: str, new: ResultSet, out: Path) -> Changes:
    """Return what replacing the baseline ``out`` by the results ``new`` would change. If ``out``
    cannot be read or is of other data, the problems say so."""
    try:
        old = read(out)
        lines = tuple(compare_sets(old, new))
    except ResultsError as error:
        problem = f"nothing to compare with: {error}"
        return Changes(old=str(out), new=name, lines=(), problems=(problem,))
    gone = [f"{cell}: no longer gated" for cell in old.cells if cell not in new.cells]
    fresh = [f"{cell}: newly gated" for cell in new.cells if cell not in old.cells]
    return Changes(old=str(out), new=name, lines=lines, problems=(*gone, *fresh))


def read(path: Path) -> ResultSet:
    """Read a baseline: an archive, or a results folder. Raises ResultsError if it is missing,
    damaged, incomplete or of another version."""
    if path.is_dir():
        return _complete(Store(path), path)
    if not path.is_file():
        raise ResultsError(f"{path}: no such baseline; {REMEDY}")
    if path.read_bytes().startswith(EARLIER):
        raise ResultsError(f"{path}: a baseline of an earlier version, which is not read; {REMEDY}")
    with TemporaryDirectory() as folder:
        extract(path, Path(folder), REMEDY)
        return _complete(Store(Path(folder)), path)


def _complete(store: Store, path: Path) -> ResultSet:
    try:
        results = read_results(store, decimals=DECIMALS)
    except ResultsError as error:
        why = str(error).replace(f"{store.directory}/", "")
        raise ResultsError(f"{path}: incomplete ({why}); {REMEDY}") from None
    if results.broken:
        why = "; ".join(group_by_reason(results.broken.items()))
        raise ResultsError(f"{path}: incomplete ({why}); {REMEDY}")
    return results
