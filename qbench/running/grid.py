"""The loop over a grid: which cells are there already, and who runs the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from qbench.cell import cache_folder, failed
from qbench.errors import NewerSchemaError, ResultsError
from qbench.plan import Cell, Plan
from qbench.progress import Progress, RemoteProgress, SilentProgress
from qbench.records import Grid, Record, Unavailable
from qbench.running.executors import SerialExecutor
from qbench.running.order import in_order
from qbench.running.relay import Relay
from qbench.running.work import Work, complete, give_up, rows_problem, settled
from qbench.store import Store, run_id

DIED = "its process was killed (out of memory?); see its log"
BROKEN = "the executor broke before it began; run again"


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
    """Run the cells that have no good record in the folder ``out``; the records, in order.

    ``cells`` are some of the plan's (None: all). ``executor`` is any of ``concurrent.futures``
    (None: one cell after the other, here); the caller shuts it down. ``progress`` shows progress.
    ``force`` makes good records again. ``cache`` is where quantized weights and unquantized
    distributions are kept.

    A cell whose process dies beside others is tried once more, alone, so that only a cell that
    kills its process fails. Cells that another run is at work on come last, when it has finished
    them.
    """
    wanted, shown = plan.cells if cells is None else cells, progress or SilentProgress()
    store = Store(out)
    remote = executor if isinstance(executor, Remote) else None
    problem = remote.rows_problem if remote else rows_problem(cache or cache_folder())
    put_grid(plan, store, shown)
    refused = _refused(plan, wanted, store, shown)
    mine = [cell for cell in wanted if cell.name not in refused]
    grid = _Grid(plan, store, shown, force, _without_distributions(mine, store, problem, shown))
    grid.done |= refused
    missing = grid.take_what_is_there(mine, problem)
    if executor is None:
        work = Work(plan=plan, out=out, progress=shown, cache=cache)
        grid.run(missing, SerialExecutor(), work, None)
    elif missing:
        with remote.relay(shown) if remote else Relay(shown) as relay:
            work = Work(plan=plan, out=out, progress=relay.address, cache=cache)
            grid.run(in_order(missing), executor, work, relay)
    return [grid.done[cell.name] for cell in wanted]


class Told(Protocol):
    """Where cells elsewhere tell what they do, and what is known from it."""

    @property
    def address(self) -> RemoteProgress: ...

    @property
    def begun(self) -> set[str]:
        """Cells that were ever at work."""

    def beside(self, cell: str) -> frozenset[str] | None:
        """Which cells were at work in the process of ``cell`` when that died; None where it never
        said that it began."""


@runtime_checkable
class Remote(Protocol):
    """An executor over other hosts: progress and caches are not where the run is."""

    def relay(self, progress: Progress) -> AbstractContextManager[Told]: ...

    def rows_problem(self, key: str) -> str | None:
        """Why the rows of the unquantized cell ``key`` can be used nowhere; None where they can
        somewhere."""


class _Grid:
    """One run's state: what is done, and what died."""

    def __init__(
        self, plan: Plan, store: Store, progress: Progress, force: bool, again: set[str]
    ) -> None:
        self.plan, self.store, self.progress = plan, store, progress
        self.force, self.again = force, again
        self.begun = datetime.now(UTC)
        self.done: dict[str, Record] = {}

    def take_what_is_there(
        self, cells: Sequence[Cell], problem: Callable[[str], str | None]
    ) -> list[Cell]:
        """The cells that are left to run. Nobody starts a process to find a record."""
        missing: list[Cell] = []
        keys: set[str] = set()
        for cell in cells:  # unquantized ones first: what is measured against them comes after
            forced = self.force or cell.name in self.again
            known = None if forced else self.store.whole(cell.grid_cell)
            awaited = cell.base is not None and cell.base.key in keys
            whole = complete(known, cell, self.store, problem)
            if not (settled(known, cell) if awaited else whole):
                missing.append(cell)
                keys.add(cell.key)
                continue
            assert known is not None
            self.progress.begin(cell.name)
            self.progress.log(f"{cell.name}: already there")
            self.progress.end(cell.name)
            self.done[cell.name] = known
        return missing

    def run(
        self, cells: Sequence[Cell], executor: Executor, work: Work, relay: Told | None
    ) -> None:
        forced = {cell.name for cell in cells if self.force or cell.name in self.again}
        submit = partial(self._side_by_side, executor=executor, work=work, relay=relay)
        busy, died = submit(cells, forced=forced, wait=False)
        # what another run has made meanwhile is made anew
        later, more = submit(busy, forced=set(), wait=True)
        assert not later, "a cell that waits is never busy"
        for cell in (*died, *more):
            self.progress.log(f"{cell.name}: its process died; once more, alone", "bold red")
            _, again = submit([cell], forced=forced, wait=True)
            for one in again:
                begun = relay is None or one.name in relay.begun
                self._give_up(one, DIED if begun else BROKEN)
        if busy or died or more:
            submit(self._unmeasured(cells), forced=set(), wait=True)

    def _unmeasured(self, cells: Sequence[Cell]) -> list[Cell]:
        """Cells scored while the unquantized cell that they are measured against had died, and
        was still to be run once more."""
        damages = ((cell, self.done[cell.name].damage) for cell in cells)
        return [cell for cell, one in damages if isinstance(one, Unavailable) and one.retry]

    def _side_by_side(
        self,
        cells: Sequence[Cell],
        *,
        executor: Executor,
        work: Work,
        relay: Told | None,
        forced: set[str],
        wait: bool,
    ) -> tuple[list[Cell], list[Cell]]:
        """Runs ``cells``; those that others are at work on, and those that died with their
        process, though it may have been a neighbour's fault."""
        futures: dict[Future, Cell] = {}
        busy, died = [], []
        for cell in cells:
            settings = {"force": cell.name in forced, "wait": wait}
            try:
                futures[executor.submit(work, cell.name, **settings)] = cell
            except BrokenExecutor:
                died.append(cell)
        for future in as_completed(futures):
            cell = futures[future]
            try:
                record = future.result()
            except (BrokenExecutor, CancelledError):
                beside = relay.beside(cell.name) if relay is not None else None
                if beside is not None and not beside:
                    self._give_up(cell, DIED)
                else:
                    died.append(cell)
                continue
            if record is None:
                busy.append(cell)
                continue
            assert record.key == cell.key, f"{cell.name}: the worker's plan differs"
            self.done[cell.name] = record
        return busy, died

    def _give_up(self, cell: Cell, why: str) -> None:
        self.done[cell.name] = give_up(
            self.plan,
            cell.name,
            why,
            out=self.store.directory,
            progress=self.progress,
            begun=self.begun,
            force=self.force,
        )


def _refused(
    plan: Plan, cells: Sequence[Cell], store: Store, progress: Progress
) -> dict[str, Record]:
    """Failed records, which are not written, of cells whose record, or that of the unquantized
    cell that they are measured against, a newer qbench wrote: it is neither read nor replaced."""
    found = {}
    for cell in cells:
        try:
            for one in (cell.grid_cell, cell.base):
                if one is not None:
                    store.get(one)
        except NewerSchemaError as error:
            found[cell.name] = failed(cell, plan, str(error))
            progress.log(f"{cell.name}: left alone: {error}", "bold red")
        except ResultsError:
            pass  # damaged or older: made again
    return found


def readable(grid: Grid, store: Store) -> Grid:
    """``grid`` without the cells whose record a newer qbench wrote."""
    cells = []
    for cell in grid.cells:
        with suppress(NewerSchemaError):
            store.get(cell)
            cells.append(cell)
    return grid.model_copy(update={"cells": tuple(cells)})


def put_grid(plan: Plan, store: Store, progress: Progress) -> None:
    """Say what the folder is of from now on; records under other keys stay where they are."""
    try:
        other = store.has_grid() and store.grid().cells != plan.grid.cells
        earlier = run_id(store.grid()) if other else ""
    except NewerSchemaError:
        raise
    except ResultsError as error:  # damaged or old: written anew
        progress.log(str(error))
        other = False
    if other:
        progress.log(
            f"{store.directory} held results of other settings or versions; they stay, and "
            f"`qbench tables {store.directory} --run {earlier}` shows them"
        )
    store.put_grid(plan.grid)


def _without_distributions(
    cells: Sequence[Cell], store: Store, problem: Callable[[str], str | None], progress: Progress
) -> set[str]:
    """Unquantized cells to score again, because cells that are still to run measure against
    their distributions, and those are gone or damaged; ``progress`` is told why."""
    needed = {
        cell.base.key: cell.name
        for cell in cells
        if cell.base is not None and not settled(store.whole(cell.grid_cell), cell)
    }
    again = set()
    for cell in cells:
        if cell.key not in needed or (why := problem(cell.key)) is None:
            continue
        again.add(cell.name)
        if settled(store.whole(cell.grid_cell), cell):
            progress.log(f"{cell.name}: made again for {needed[cell.key]}: {why}")
    return again


def total(records: Sequence[Record], seconds: float) -> str:
    """One line on what a run's cells took: ``seconds`` by the clock, and the sum of each stage
    over the cells, which is more where they ran side by side."""
    stages: dict[str, float] = {}
    for record in records:
        for stage in record.stages:
            stages[stage.name] = stages.get(stage.name, 0.0) + stage.seconds
    sums = ", ".join(f"{name} {spent:.0f} s" for name, spent in stages.items())
    count = f"{len(records)} cells" if len(records) > 1 else "1 cell"
    return f"{count} in {seconds:.0f} s; summed over cells: {sums}"
