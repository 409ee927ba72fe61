"""One cell on a worker: what it lacks, or its record with everything that belongs to it.

The cell is run into a folder of the worker's own cache, and comes back through the engine: no
file system is shared. What a worker finished while nobody could hear it is found there again.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.cluster.events import Topic
from qbench.cluster.located import WHOLE, Wanted, cache_identity, located
from qbench.code import code_digest
from qbench.evaluation.base_file import base_rows_file, base_rows_usable, checksum_file
from qbench.machine.environment import hardware, versions
from qbench.plan import Plan
from qbench.plugins import load, load_packages
from qbench.record import GridCell, Record
from qbench.run import cache_folder, distributions_folder
from qbench.running.work import run_cell
from qbench.store import Store

if TYPE_CHECKING:
    from distributed import Worker

FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
CELLS = "cells"  # the results folder within a worker's cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What a worker says of itself."""

    name: str
    cache: str  # the same for all who see one folder
    threads: int
    gpu: str | None
    code: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What damage of a cell is taken against: the unquantized cell, its record's files (in the
    cache, under ``record``), and its rows (under ``rows``; None where nobody has them)."""

    cell: GridCell
    record: Wanted
    rows: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The host lacks ``wanted`` of the plan's host, or the folders ``passed`` of another cache."""

    worker: str
    wanted: tuple[Wanted, ...]
    passed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """A cell's record with its tables as they were written, its log, and where it ran."""

    worker: str
    record: Record
    tables: dict[str, bytes]
    log: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """This worker cannot run the cell, another may."""

    worker: str
    reason: str
    deaths: int = 0  # of workers, while the cell was at work on them
    full: bool = False  # its disk; it is not asked again


@functools.cache
def _names_of_versions() -> tuple[str, ...]:
    return ("triton", "bitsandbytes", "hqq", "gptqmodel", "optimum", "torchao", "accelerate")


def describe(device: str | None, dask_worker: Worker | None = None) -> Host:
    """This worker; ``device`` None is a GPU where there is one. Dask fills in the worker."""
    from qbench.machine.devices import cuda_problem

    with_gpu = device != "cpu" and cuda_problem() is None
    return Host(
        name=socket.gethostname(),
        cache=cache_identity(cache_folder()),
        threads=dask_worker.state.nthreads if dask_worker else 1,
        gpu=hardware("cuda") if with_gpu else None,
        code=code_digest(),
        versions=versions(_names_of_versions()),
    )


def here() -> Host:
    """The host of the plan, to hold workers against."""
    return Host(
        name=socket.gethostname(), cache="", threads=1, gpu=None, code=code_digest(),
        versions=versions(_names_of_versions()),
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _plan(pickled: bytes) -> Plan:
    """What is from outside the package comes along, and is imported first."""
    plugins, plan = pickle.loads(pickled)
    load(plugins)
    load_packages()
    return pickle.loads(plan)


def run_remote(
    pickled: bytes,
    name: str,
    *,
    topic: Topic,
    force: bool,
    base: Base | None,
    artifact: str | None,
) -> Returned | Missing | Refused:
    """The cell ``name`` of a plan, run on the worker that calls this."""
    from distributed import get_worker

    worker, cache = get_worker(), cache_folder()
    if (deaths := topic.deaths(worker)) >= topic.most_deaths:
        return Refused(worker=worker.address, reason="it killed its workers", deaths=deaths)
    plan, wanted = located(_plan(pickled), name, cache)
    passed = _take_base(base, cache, wanted)
    if artifact is not None and not (cache / artifact).is_dir():
        passed.append(artifact)
    if wanted or passed:
        return Missing(worker=worker.address, wanted=tuple(wanted), passed=tuple(passed))
    topic.mark(worker)
    try:
        return _run(plan, name, cache, topic, force, worker.address)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{error.strerror} on {socket.gethostname()}"
        return Refused(worker=worker.address, reason=reason, full=True)


def _run(
    plan: Plan, name: str, cache: Path, topic: Topic, force: bool, worker: str
) -> Returned | Refused:
    folder = cache / CELLS
    record = run_cell(plan, name, out=folder, sink=topic, cache=cache, force=force, wait=False)
    if record is None:  # a process that does not answer any more may hold the cell
        folder = cache / f"{CELLS}-{topic.attempt}"
        _copy_base(plan, name, cache / CELLS, folder)
        record = run_cell(plan, name, out=folder, sink=topic, cache=cache, force=force)
    assert record is not None, "who waits gets a record"
    if record.status == "failed" and any(text in (record.error or "") for text in FULL):
        reason = f"{record.error} (on {socket.gethostname()})"
        return Refused(worker=worker, reason=reason, full=True)
    store, cell = Store(folder), plan.cell(name).grid_cell
    tables = {table: store.payload(record, table) for table in record.files}
    log = store.log(cell)
    text = log.read_text(errors="replace") if log.is_file() else ""
    if folder.name != CELLS:
        shutil.rmtree(folder, ignore_errors=True)
    return Returned(worker=worker, record=record, tables=tables, log=text)


def _copy_base(plan: Plan, name: str, origin: Path, folder: Path) -> None:
    base = plan.cell(name).base
    if base is not None:
        shutil.copytree(
            origin / "records" / base.cell, folder / "records" / base.cell,
            ignore=shutil.ignore_patterns("*.lock"), dirs_exist_ok=True,
        )  # fmt: skip


def _take_base(base: Base | None, cache: Path, wanted: list[Wanted]) -> list[str]:
    """Put the record and rows that damage is taken against where the cell looks for them."""
    if base is None:
        return []
    store = Store(cache / CELLS)
    if store.whole(base.cell) is None:
        if not (cache / base.record.target / WHOLE).is_file():
            wanted.append(base.record)
        else:
            _link(cache / base.record.target, store.lock_file(base.cell).parent)
    rows = base_rows_file(distributions_folder(cache), base.cell.key)
    if base.rows is None or base_rows_usable(rows, base.cell.key):
        return []
    if not (cache / base.rows / WHOLE).is_file():
        return [base.rows]
    _link(cache / base.rows, rows.parent)
    return []


def _link(origin: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in origin.iterdir():
        if path.name == WHOLE:
            continue
        target = folder / path.name
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:  # a file system without links
            shutil.copy2(path, target)


def forget(cell: GridCell) -> None:
    """Remove what this worker keeps of a cell whose record has arrived."""
    store = Store(cache_folder() / CELLS)
    record = store.whole(cell)
    for path in (*(store.files_of(record) if record else ()), store.log(cell)):
        path.unlink(missing_ok=True)


def log_here(cell: GridCell) -> str | None:
    """What this worker's libraries printed while ``cell`` was at work."""
    log = Store(cache_folder() / CELLS).log(cell)
    return log.read_text(errors="replace") if log.is_file() else None


def artifact_here(digest: str, settings: dict[str, Any]) -> str | None:
    """The folder of this worker's cache with the quantized weights of the checkpoint ``digest``
    under the quantizer ``settings``; None where they are not here."""
    root = cache_folder() / "artifacts" / digest[:16]
    for manifest in sorted(root.glob("*/manifest.json")):
        with suppress(OSError, ValueError, KeyError):
            parts = json.loads(manifest.read_bytes())["parts"]
            if parts["quantizer"] == settings and parts["code"] == code_digest():
                return manifest.parent.relative_to(cache_folder()).as_posix()
    return None


def rows_here(key: str) -> str | None:
    """The folder of this worker's cache from which the rows of the unquantized cell ``key`` can be
    read by others; None where they are not here."""
    cache = cache_folder()
    path = base_rows_file(distributions_folder(cache), key)
    if not base_rows_usable(path, key):
        return None
    sidecar = checksum_file(path)
    target = f"files/rows-{key[:16]}-{sidecar.read_text()[:16]}"
    folder = cache / target
    if not (folder / WHOLE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for source in (path, sidecar):
            with suppress(FileExistsError):
                os.link(source, folder / source.name)
        (folder / WHOLE).touch()
    return target
