"""Run the cells of a plan: reuse finished ones, order the rest."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future
from concurrent.futures import wait as wait_for
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from qbench.attention import NATIVE
from qbench.cell_result import CellResult
from qbench.errors import CheckpointError, ResultsError
from qbench.evaluation.settings import tolerance_violation
from qbench.files import cache_folder
from qbench.machine import attempt, broken_device
from qbench.plan import Cell, Plan
from qbench.plugins import Plugin, load, loaded
from qbench.progress import Progress, SilentProgress
from qbench.records import Record, Unavailable
from qbench.runner.progress import listening
from qbench.runner.workers import PRELOAD, LostExecutorError, Workers
from qbench.store import Sources, Store, baseline_files, keep_sources, verify_baseline

DIED = "its process was killed; see its log, and run again (--workers 1 if memory was short)"
DEAD = (BrokenExecutor, CancelledError)
T = TypeVar("T")


def _call(plugins: tuple[Plugin, ...], function: bytes, *arguments: Any, **settings: Any) -> Any:
    """Load the plug-ins of the process that pickled ``function``; unpickle and call it."""
    load(plugins)
    return pickle.loads(function)(*arguments, **settings)


def run_cells(
    plan: Plan,
    *,
    out: Path,
    cells: Sequence[Cell] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    force: bool = False,
    cache: Path | None = None,
) -> list[Record]:
    """Run the cells that have no valid record in the folder ``out``; return all records in order.

    ``cells``: some of the plan's (None: all). ``executor``: any of ``concurrent.futures`` (None:
    one cell after the other in this process); the caller shuts it down. ``force``: run cells with
    valid records too. ``cache``: folder of quantized weights and unquantized hidden states (None:
    ``$QBENCH_CACHE``).

    A cell begins after the unquantized cell that its damage is measured against, or beside it if
    one of ``Workers`` is free. If a cell fails or its process dies, its record says so and the
    others go on. The plan's manifest replaces the folder's. Raises NewerSchemaError if a newer
    qbench wrote that.
    """
    chosen, manifest = plan.cells if cells is None else cells, plan.manifest()
    grid = _GridRun(plan, Store(out), progress or SilentProgress(), cache or cache_folder(), force)
    before = grid.store.put_manifest(manifest, grid.progress.log)
    if before is not None and before.cells != manifest.cells:
        grid.progress.log(
            f"{out} holds results of other settings or versions; they stay, and are reused if "
            "their command is run again; tables show this run"
        )
    sources = Sources(
        plan.recipe.data,
        plan.recipe.definitions,
        plan.calibration and plan.calibration.path,
        {cell.checkpoint_name: cell.checkpoint.folder for cell in plan.cells},
    )
    keep_sources(grid.cache, manifest, sources)
    missing = grid.reuse_finished(chosen)
    # those first that take longest: exact, in small packs, calibrated, other than softmax
    if executor is not None:
        missing.sort(key=lambda cell: (
            cell.base is not None, cell.scoring.mode == "fast", not cell.scoring.shares_scales,
            not cell.quantization.needs_calibration,
            not getattr(cell.quantization.weights, "optimize", False),
            cell.checkpoint.normalizer in ("softmax", NATIVE),
        ))  # fmt: skip
    if executor is not None and missing:
        grid.run(missing, executor)
    elif missing:
        grid.run_here(missing)
    return [grid.done[cell.name] for cell in chosen]


def _submit(executor: Executor, call: Callable[..., T], *arguments: Any, **more: Any) -> Future[T]:
    """Submit a call; if the executor is broken, return a failed future instead of raising."""
    try:
        return executor.submit(partial(_call, loaded(), pickle.dumps(call)), *arguments, **more)
    except BrokenExecutor as error:
        future: Future[T] = Future()
        future.set_exception(error)
        return future


@dataclass(slots=True)
class _GridRun:
    """The state of one run: the records that are ``done``, the finished cells to ``rerun``."""

    plan: Plan
    store: Store
    progress: Progress
    cache: Path
    force: bool
    begun: datetime = field(default_factory=partial(datetime.now, UTC))
    at_once: int = sys.maxsize  # cells that run side by side
    early: bool = False  # cells begin beside the unquantized one
    done: dict[str, Record] = field(default_factory=dict)
    rerun: set[str] = field(default_factory=set)

    def reuse_finished(self, cells: Sequence[Cell]) -> list[Cell]:
        """Put the finished records of ``cells`` into ``done``; return the cells left to run.

        A finished unquantized cell runs again, and a line says so, if its hidden states are gone or
        damaged and a cell that is left to run is measured against them.
        """
        records = {
            cell.name: None if self.force else self.store.get_valid(cell.grid_cell)
            for cell in cells
        }
        needed = {
            cell.base.key: cell.name
            for cell in cells
            if cell.base is not None and lacks(records[cell.name], cell)
        }
        missing: list[Cell] = []
        keys: set[str] = set()
        for cell in cells:  # unquantized ones first: what is measured against them comes after
            record = records[cell.name]
            other = None if lacks(record, cell) else needed.get(cell.key)
            if other is not None and (why := baseline_error(self.cache, cell, record)):
                self.rerun.add(cell.name)
                self.progress.log(f"{cell.name}: made again, since {other} needs it: {why}")
            finished = is_up_to_date(record, cell, self.plan, self.store, self.cache, made=keys)
            if cell.name in self.rerun or not finished:
                missing.append(cell)
                keys.add(cell.key)
                continue
            self.progress.begin(cell.name)
            self.progress.log(f"{cell.name}: already finished")
            self.progress.end(cell.name)
            self.done[cell.name] = record
        return missing

    def run_here(self, cells: Sequence[Cell]) -> None:
        """Run ``cells`` in this process, one after the other; their records go to ``done``."""
        for cell in cells:
            if (problem := broken_device()) is not None:
                why = f"not run: an earlier cell left the GPU unusable ({problem}); run again"
                self.done[cell.name] = self.give_up(cell, why)
                continue
            self.done[cell.name] = run_cell(
                self.plan, cell.name, store=self.store, cache=self.cache, progress=self.progress,
                force=self.force or cell.name in self.rerun, reuse=not self.force,
            )  # fmt: skip

    def run(self, cells: Sequence[Cell], executor: Executor) -> None:
        """Run ``cells`` side by side on ``executor``; their records go to ``done``."""
        store, cache = copy(self.store), self.cache.resolve()
        store.directory = store.directory.resolve()
        if isinstance(executor, Workers):  # of this host, with one cache
            self.at_once, self.early = executor.processes, not self.force
        # an executor over other hosts has its own ``listen``
        with getattr(executor, "listen", listening)(self.progress) as reporter:
            call = partial(run_cell, self.plan, store=store, cache=cache, reuse=not self.force)
            self._side_by_side(cells, partial(_submit, executor, call, progress=reporter))

    def _side_by_side(self, cells: Sequence[Cell], submit: Callable[..., Future]) -> None:
        """Run ``cells``, each after the cell that it depends on. If a process is free, one begins
        beside that cell too: it loads, quantizes and audits meanwhile, and waits for each task."""
        waiting, at_work = list(cells), dict[Future, Cell]()
        with TemporaryDirectory() as folder:

            def mark(name: str) -> Path:
                """Return the file that exists while the cell ``name`` is at work."""
                return Path(folder, name.replace("/", " "))

            while waiting or at_work:
                unfinished = {cell.key for cell in (*waiting, *at_work.values())}
                ready = [c for c in waiting if c.base is None or c.base.key not in unfinished]
                if self.early:
                    running = {cell.name for cell in (*ready, *at_work.values())}
                    ready = [c for c in waiting if c in ready or c.base.cell in running]
                for cell in ready[: max(0, self.at_once - len(at_work))]:
                    # one that is ready once a process is free may take longer than the rest
                    waiting.remove(cell)
                    mark(cell.name).touch()
                    base = None if cell.base is None else mark(cell.base.cell)
                    again = self.force or cell.name in self.rerun
                    at_work[submit(cell.name, force=again, base_at_work=base)] = cell
                for future in wait_for(at_work, return_when=FIRST_COMPLETED).done:
                    cell = at_work.pop(future)
                    mark(cell.name).unlink()
                    try:
                        record = future.result()
                    except DEAD as error:
                        self.progress.end(cell.name)
                        lost = isinstance(error, LostExecutorError)
                        record = self.give_up(cell, str(error) if lost else DIED)
                    assert record.key == cell.key, f"{cell.name}: the worker's plan differs"
                    self.done[cell.name] = record

    def give_up(self, cell: Cell, line: str) -> Record:
        """Write and return a failed record for a cell whose process died with the error ``line``;
        return a good record instead if one was written meanwhile, by another run or by the dying
        process."""
        with FileLock(self.store.path(cell.grid_cell, ".lock")):
            record = self.store.get_valid(cell.grid_cell)
            good = record is not None and record.status == "ok"
            if record is not None and good and (not self.force or record.started >= self.begun):
                return record
            record = CellResult(cell=cell, plan=self.plan).save(self.store, line)
        self.progress.log(summary(record), "bold red")
        return record


def run_cell(
    plan: Plan,
    name: str,
    *,
    store: Store,
    cache: Path,
    progress: Progress,
    force: bool = False,
    reuse: bool = True,
    base_at_work: Path | None = None,
) -> Record:
    """Return the valid record of the cell ``name`` in the ``store``; compute the cell if there is
    none, if damage can be added to it, or with ``force``. If the cell fails, the record says so.

    ``cache`` holds quantized weights, unquantized hidden states and finished tasks, which are used
    unless ``reuse`` is false. ``base_at_work``: a file that exists while another process computes
    the cell that damage is measured against. The cell is locked meanwhile: if another run computes
    it, this waits and takes its record if it is valid, even with ``force``.
    """
    cell = plan.cell(name)
    lock = FileLock(store.path(cell.grid_cell, ".lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        progress.log(f"{cell.name}: another run computes it; waiting for its record")
        held, force = lock.acquire(), False
    with held:  # released at the end
        record = store.get_valid(cell.grid_cell, progress.log)
        progress.begin(cell.name)
        made = {cell.base.key} if base_at_work is not None and base_at_work.exists() else set()
        if not force and is_up_to_date(record, cell, plan, store, cache, made=made):
            progress.log(f"{cell.name}: already finished")
        else:
            record = run(cell, plan, store, progress, cache, reuse=reuse, base_at_work=base_at_work)
            progress.log(summary(record), "bold red" if record.status == "failed" else "")
        progress.end(cell.name)
        return record


def run(
    cell: Cell, plan: Plan, store: Store, progress: Progress, cache: Path, **settings: Any
) -> Record:
    """Compute one cell and return its record, a failed one if an exception was raised. The record
    is written, but a failed one never replaces a good one. The libraries' output goes to the cell's
    log. ``settings``: of ``qbench.cell.compute``."""
    result = CellResult(cell=cell, plan=plan, progress=progress)

    def work() -> None:
        import_module(PRELOAD)
        from qbench.cell import compute

        try:
            compute(result, store, cache, **settings)
        except CheckpointError:
            result.bad_input = True
            raise

    return result.save(store, attempt(work, store.path(cell.grid_cell, ".log"), plan.device))


def lacks(record: Record | None, cell: Cell) -> str | None:
    """Return "scores" if a run could add scores to the record (it is None or failed, a task failed,
    or fast scores are beyond the tolerance of ``cell``); else "damage" if only that is missing and
    could be measured; None if nothing."""
    if record is None or record.status != "ok" or record.failed_tasks:
        return "scores"
    if tolerance_violation(cell.scoring.tolerance, record.scoring) is not None:
        return "scores"
    return "damage" if isinstance(record.damage, Unavailable) and record.damage.retry else None


def is_up_to_date(
    record: Record | None,
    cell: Cell,
    plan: Plan,
    store: Store,
    cache: Path,
    *,
    made: Collection[str] = (),
) -> bool:
    """Return whether a run can add nothing to the record: it lacks no scores, and no damage that
    can be measured now. Damage can be measured if the unquantized cell's hidden states are in the
    ``cache``, or will be, since its key is in ``made``, the keys of cells that run before or
    beside."""
    lacking = lacks(record, cell)
    if lacking != "damage":
        return lacking is None
    if cell.base.key in made:
        return False
    base = store.get_valid(cell.base)
    if base is None or base.status != "ok":
        return True
    return baseline_error(cache, plan.cell(cell.base.cell), base) is not None


def baseline_error(cache: Path, cell: Cell, record: Record) -> str | None:
    """Return why the hidden states of the unquantized ``cell``, whose record is ``record``, cannot
    be used from the ``cache``; None if they can."""
    tasks = {score.task for score in record.scores}
    try:
        for path, key in baseline_files(cache, cell.key_parts, tasks).items():
            verify_baseline(path, key)
    except ResultsError as error:
        return str(error)
    return None


def summary(record: Record) -> str:
    """Return one line on a finished cell: its error, or stages with seconds, the audit's
    measurements, why decoding used no CUDA graph, and the tasks that failed."""
    if record.status == "failed":
        return f"{record.cell}: FAILED: {record.error}"
    parts = [", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in record.stages)]
    audit = record.audit
    if audit and record.precision.weights:
        bits, error = audit.bits_per_weight, audit.weight_error
        parts.append(f"{bits:.2f} bits per weight, weight error {error:.3f}")
    if audit and (inputs := audit.activations):
        parts.append(f"{inputs.bits:g} bits per activation, error {inputs.error:.3f}")
    if audit and (cache := audit.kv_cache):
        parts.append(
            f"{cache.bits_per_value:.2f} bits per cached value, errors {cache.key_error:.3f} of "
            f"keys and {cache.value_error:.3f} of values"
        )
    if record.scoring is not None and record.scoring.graph_error is not None:
        parts.append(f"decoding without a CUDA graph, as {record.scoring.graph_error}")
    lost = "".join(f"; {task} FAILED: {why}" for task, why in record.failed_tasks.items())
    return f"{record.cell}: done ({'; '.join(parts)}){lost}"
