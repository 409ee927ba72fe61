"""The unit of work: one cell of a plan, run wherever this is called. It can be pickled.

Whoever holds a cell's lock is at work on it, so that several runs may share a results folder.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qbench.cell import cache_folder, distributions_folder, failed, run
from qbench.errors import ResultsError
from qbench.evaluation.baseline import baseline_file, verify_baseline
from qbench.evaluation.settings import exceeded
from qbench.plan import Cell, Plan
from qbench.plugins import Plugin, load, load_packages
from qbench.progress import Progress, RemoteProgress
from qbench.records import Record, Unavailable
from qbench.running.units import Base, Made, Remote, There
from qbench.store import Store


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the cells of one run have in common. It can be pickled, and called with a cell's name:
    the unit of work that executors of this host are given. Those over other hosts ask it for the
    rest, as a ``running.units.Unit``."""

    plan: Plan
    out: Path
    progress: Progress | RemoteProgress
    cache: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """What is from outside the package is loaded first wherever this is unpickled, in an
        executor's own processes too."""
        plan = pickle.dumps(self.plan)
        return _unpickled, (self.plan.plugins, plan, self.out, self.progress, self.cache)

    def __call__(self, name: str, *, force: bool = False, wait: bool = True) -> Record | None:
        return run_cell(
            self.plan,
            name,
            out=self.out,
            progress=self.progress,
            cache=self.cache,
            force=force,
            wait=wait,
        )

    def remote(self, name: str) -> RemoteCells:
        return RemoteCells()

    def lock_file(self, name: str) -> Path:
        return self._store.lock_file(self.plan.cell(name).grid_cell)

    def kept(self, name: str) -> str:
        return self.log_file(name).with_suffix("").relative_to(self.out).as_posix()

    def log_file(self, name: str) -> Path:
        return self._store.log(self.plan.cell(name).grid_cell)

    def awaits(self, name: str) -> str | None:
        base = self.plan.cell(name).base
        return base.cell if base is not None else None

    def base(self, name: str) -> Base | None:
        base = self.plan.cell(name).base
        record = self._store.whole(base) if base is not None else None
        if base is None or record is None or record.status != "ok":
            return None
        return Base(cell=base, files=tuple(self._store.files_of(record)))

    def known(
        self, name: str, *, say: Callable[..., None], problem: Callable[[str], str | None]
    ) -> Record | None:
        cell = self.plan.cell(name)
        known = self._store.whole(cell.grid_cell, say)
        return known if complete(known, cell, self._store, problem) else None

    def adopt(self, name: str, made: Made) -> Record:
        return self._store.adopt(made.record, dict(made.tables), made.log)

    def failed(self, name: str, error: str) -> Record:
        return self._store.put(failed(self.plan.cell(name), self.plan, error), None, None)

    @property
    def _store(self) -> Store:
        return Store(self.out)


@dataclass(frozen=True)
class RemoteCells(Remote):
    """Cells run on another host, into a results folder there."""

    def run(self, plan: Plan, name: str, there: There) -> Made | None:
        record = run_cell(
            plan, name, out=there.out, progress=there.progress, cache=there.cache,
            force=there.force,
            wait=False,
        )  # fmt: skip
        if record is None:
            return None
        store = Store(there.out)
        log = store.log(plan.cell(name).grid_cell)
        return Made(
            record=record,
            tables={table: store.payload(record, table) for table in record.files},
            log=log.read_text(errors="replace") if log.is_file() else "",
        )


def _unpickled(
    plugins: tuple[Plugin, ...],
    plan: bytes,
    out: Path,
    progress: Progress | RemoteProgress,
    cache: Path | None,
) -> Work:
    load(plugins)
    load_packages()
    return Work(plan=pickle.loads(plan), out=out, progress=progress, cache=cache)


def run_cell(
    plan: Plan,
    name: str,
    *,
    out: Path,
    progress: Progress | RemoteProgress,
    cache: Path | None = None,
    force: bool = False,
    wait: bool = True,
) -> Record | None:
    """The good record of the cell ``name``, made now if need be.

    ``out`` is the results folder, ``cache`` where quantized weights and unquantized
    distributions are kept (None: where this host keeps them). ``force`` makes the record again.
    None where another run is at work on the cell and ``wait`` is false.
    """
    cell, store, kept = plan.cell(name), Store(out), cache or cache_folder()
    with opened(progress) as told:
        try:
            with FileLock(store.lock_file(cell.grid_cell), timeout=-1 if wait else 0):
                known = store.whole(cell.grid_cell, told.log)
                told.begin(cell.name)
                if not force and complete(known, cell, store, rows_problem(kept)):
                    told.log(f"{cell.name}: already there")
                    record = known
                else:
                    record = run(cell, plan, store, told, kept)
                    told.log(summary(record), "bold red" if record.status == "failed" else "")
                told.end(cell.name)
                return record
        except Timeout:
            told.log(f"{cell.name}: another run is at work on it; later")
            return None


def give_up(
    plan: Plan,
    name: str,
    error: str,
    *,
    out: Path,
    progress: Progress,
    begun: datetime,
    force: bool,
) -> Record:
    """The record of a cell whose process died in a run that began at ``begun``.

    Another run, or this one in its last moment, may have made a good record meanwhile: the store
    is looked at again under the cell's lock, and a good record is never replaced by a failed one.
    """
    cell, store = plan.cell(name), Store(out)
    with FileLock(store.lock_file(cell.grid_cell)):
        known = store.whole(cell.grid_cell)
        good = known is not None and known.status == "ok"
        if known is not None and good and (not force or known.started >= begun):
            return known
        record = failed(cell, plan, error)
        if not good:
            store.put(record, None, None)
    progress.log(summary(record), "bold red")
    return record


def passes(known: Record | None, cell: Cell) -> bool:
    """Whether a record is there that passed, all its tasks, under the tolerance asked for now."""
    if known is None or known.status != "ok" or known.failed_tasks:
        return False
    return exceeded(cell.scoring.tolerance, known.scoring) is None


def settled(known: Record | None, cell: Cell) -> bool:
    """Whether a record is good and no later run could add to it."""
    if known is None or not passes(known, cell):
        return False
    return not (isinstance(known.damage, Unavailable) and known.damage.retry)


def complete(
    known: Record | None, cell: Cell, store: Store, problem: Callable[[str], str | None]
) -> bool:
    """Whether a record is good, and has the damage that can be had by now. ``problem`` says why
    the rows of an unquantized cell, by its key, cannot be used; None where they can."""
    if not passes(known, cell) or settled(known, cell):
        return settled(known, cell)
    assert cell.base is not None
    base = store.whole(cell.base)
    return base is None or base.status != "ok" or problem(cell.base.key) is not None


def rows_problem(cache: Path) -> Callable[[str], str | None]:
    """Why the rows of an unquantized cell in this host's ``cache`` cannot be used, by its key."""

    def problem(key: str) -> str | None:
        try:
            verify_baseline(baseline_file(distributions_folder(cache), key), key)
        except ResultsError as error:
            return str(error)
        return None

    return problem


def summary(record: Record) -> str:
    """One line on what a cell gave and what it cost."""
    if record.status == "failed":
        return f"{record.cell}: FAILED: {record.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in record.stages)
    proof = "".join(f"; {line}" for line in _measured(record))
    lost = "".join(f"; {task} FAILED: {why}" for task, why in record.failed_tasks.items())
    return f"{record.cell}: done ({cost}{proof}){lost}"


def _measured(record: Record) -> Iterator[str]:
    """Of each part that is quantized, what the audit measured."""
    audit, precision = record.audit, record.precision
    if audit is None:
        return
    if precision.weights is not None:
        yield f"{audit.bits_per_weight:.2f} bits a weight, weight error {audit.weight_error:.3f}"
    if audit.activations is not None:
        yield f"{audit.activations.bits:g} bits an activation, error {audit.activations.error:.3f}"
    if (cache := audit.kv_cache) is not None:
        yield (
            f"{cache.bits_per_value:.2f} bits a cached value, errors {cache.key_error:.3f} of keys "
            f"and {cache.value_error:.3f} of values"
        )


@contextlib.contextmanager
def opened(progress: Progress | RemoteProgress) -> Iterator[Progress]:
    """A connection is the cell's own and ends with it: all that it said has been read by then."""
    if not isinstance(progress, RemoteProgress):
        yield progress
        return
    sender = progress.open()
    try:
        yield sender
    finally:
        sender.close()
