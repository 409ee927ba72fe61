"""One cell on a worker: what it lacks, or its record with everything that belongs to it.

The cell is run into a folder of the worker's own cache, and comes back through the engine: no
file system is shared. What a worker finished while nobody could hear it is found there again.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.cell import cache_folder, distributions_folder
from qbench.cluster.events import Topic
from qbench.cluster.kept import artifacts_here, rows_here, usable
from qbench.cluster.located import WHOLE, Wanted, cache_identity, located
from qbench.code import code_digest
from qbench.evaluation.baseline import baseline_file, baseline_lock, checksum_file
from qbench.files import clean_temporaries, temporary
from qbench.machine.environment import hardware, versions
from qbench.plan import Plan
from qbench.plugins import load, load_packages
from qbench.records import GridCell
from qbench.running.units import Made, Remote, There
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
class BaseThere:
    """What damage of a cell is taken against: the unquantized cell, its record's files (in the
    cache, under ``record``), and its rows (under ``rows``; None where nobody has them)."""

    cell: GridCell
    record: Wanted
    rows: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One try at one cell: what is done, and what it needs of other caches."""

    cell: str
    remote: Remote
    kept: str  # what names of the cell's files begin with
    topic: Topic
    force: bool
    base: BaseThere | None
    artifacts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The host lacks ``wanted`` of the plan's host, or the folders ``passed`` of another cache."""

    worker: str
    wanted: tuple[Wanted, ...]
    passed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """What came of a cell, where it ran, and what that cache has for others now: folders of
    quantized weights by the stage that made them, and the folder of its rows."""

    worker: str
    made: Made
    artifacts: dict[str, list[str]]
    rows: str | None


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


def run_remote(pickled: bytes, call: bytes) -> Returned | Missing | Refused:
    """One cell of the plan ``pickled``, run on the worker that calls this, as ``call`` says, which
    is a pickled Call."""
    from distributed import get_worker

    worker, cache, whole = get_worker(), cache_folder(), _plan(pickled)
    asked: Call = pickle.loads(call)
    topic = asked.topic
    if (deaths := topic.deaths(worker)) >= topic.most_deaths:
        return Refused(worker=worker.address, reason="it killed its workers", deaths=deaths)
    tasks, texts = asked.remote.tasks(whole), asked.remote.texts()
    plan, here, wanted = located(whole, asked.cell, cache, tasks=tasks, texts=texts)
    passed = _take_base(asked.base, cache, wanted)
    passed += [folder for folder in asked.artifacts if not (cache / folder).is_dir()]
    if wanted or passed:
        return Missing(worker=worker.address, wanted=tuple(wanted), passed=tuple(passed))
    topic.mark(worker)
    try:
        return _run(plan, here, asked, cache, worker.address)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{error.strerror} on {socket.gethostname()}"
        return Refused(worker=worker.address, reason=reason, full=True)


def _run(
    plan: Plan, texts: dict[str, Path], asked: Call, cache: Path, worker: str
) -> Returned | Refused:
    there = There(
        texts=texts, out=cache / CELLS, cache=cache, progress=asked.topic, force=asked.force
    )  # fmt: skip
    made = asked.remote.run(plan, asked.cell, there)
    if made is None:  # a process that does not answer any more may hold the cell
        folder = cache / f"{CELLS}-{asked.topic.attempt}"
        _copy_base(asked.base, cache / CELLS, folder)
        made = asked.remote.run(plan, asked.cell, replace(there, out=folder))
        shutil.rmtree(folder, ignore_errors=True)
    assert made is not None, "nobody else knows of this folder"
    if made.error and any(text in made.error for text in FULL):
        reason = f"{made.error} (on {socket.gethostname()})"
        return Refused(worker=worker, reason=reason, full=True)
    cell = plan.cell(asked.cell)
    return Returned(
        worker=worker,
        made=made,
        artifacts=artifacts_here(cell.checkpoint.digest),
        rows=None if cell.quantization.precision.quantized else rows_here(cell.key),
    )


def _copy_base(base: BaseThere | None, origin: Path, folder: Path) -> None:
    if base is not None:
        shutil.copytree(
            origin / "records" / base.cell.cell, folder / "records" / base.cell.cell,
            ignore=shutil.ignore_patterns("*.lock"), dirs_exist_ok=True,
        )  # fmt: skip


def _take_base(base: BaseThere | None, cache: Path, wanted: list[Wanted]) -> list[str]:
    """Put the record and rows that damage is taken against where the cell looks for them."""
    if base is None:
        return []
    store = Store(cache / CELLS)
    if store.whole(base.cell) is None:
        if not (cache / base.record.target / WHOLE).is_file():
            wanted.append(base.record)
        else:
            record = store.path(base.cell.cell, base.cell.key)
            _put(cache / base.record.target, record.parent, naming=(record.name,))
    rows = baseline_file(distributions_folder(cache), base.cell.key)
    if base.rows is None or usable(rows, base.cell.key):
        return []
    if not (cache / base.rows / WHOLE).is_file():
        return [base.rows]
    with baseline_lock(rows):
        _put(cache / base.rows, rows.parent, naming=(rows.name, checksum_file(rows).name))
    return []


def _put(origin: Path, folder: Path, *, naming: Sequence[str]) -> None:
    """Each file of ``origin`` into ``folder``, where others' files are, too: whole or not at all,
    and last those whose names are ``naming``, which say what else there must be."""
    folder.mkdir(parents=True, exist_ok=True)
    clean_temporaries(folder)
    names = [path.name for path in origin.iterdir() if path.name not in (WHOLE, *naming)]
    for name in (*names, *naming):
        making = temporary(folder / name)
        making.unlink(missing_ok=True)
        try:
            _link(origin / name, making)
            making.replace(folder / name)
        finally:  # what is a link to the same file already is not replaced
            making.unlink(missing_ok=True)


def _link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError:  # a file system without links
        shutil.copy2(origin, target)


def forget(kept: list[str]) -> None:
    """Remove what this worker has of cells whose records have arrived: files whose names begin
    with ``kept``."""
    for prefix in kept:
        for path in _files(prefix):
            path.unlink(missing_ok=True)


def log_here(kept: str) -> str | None:
    """What this worker's libraries printed while a cell was at work."""
    log = cache_folder() / CELLS / f"{kept}.log"
    return log.read_text(errors="replace") if log.is_file() else None


def _files(prefix: str) -> list[Path]:
    begin = cache_folder() / CELLS / f"{prefix}."
    folder = begin.parent
    names = list(folder.iterdir()) if folder.is_dir() else []
    return [p for p in names if p.name.startswith(begin.name) and p.suffix != ".lock"]
