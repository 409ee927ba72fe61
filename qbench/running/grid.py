"""The loop over a grid: which cells are there already, and who runs the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed

from filelock import FileLock, Timeout

from qbench.errors import NewerSchemaError, ResultsError
from qbench.evaluation.base_file import base_rows_file, base_rows_usable
from qbench.plan import Cell, Plan
from qbench.record import Record, Unavailable
from qbench.run import distributions_folder, run
from qbench.running.progress import Sink
from qbench.store import Store

Work = Callable[[str, bool, bool], Record | None]


def run_grid(
    plan: Plan,
    store: Store,
    sink: Sink,
    *,
    cells: Sequence[Cell],
    executor: Executor,
    work: Work,
    force: bool = False,
) -> dict[str, Record | None]:
    """Run the cells that have no good record, through any ``concurrent.futures`` executor.

    ``work(name, force, wait)`` runs one cell where the executor puts it. Cells that another run
    is at work on come last, when that run has finished them. Returns the records by cell; None
    where the executor broke before the cell left one.
    """
    done: dict[str, Record | None] = {}
    todo, wait = list(cells), False
    again = _without_distributions(cells, store)
    while todo:
        futures: dict[Future, Cell] = {}
        for cell in todo:
            forced = force or cell.name in again
            try:
                futures[executor.submit(work, cell.name, forced, wait)] = cell
            except BrokenExecutor:
                done[cell.name] = None
        busy = []
        for future in as_completed(futures):
            cell = futures[future]
            try:
                record = future.result()
            except BrokenExecutor:
                done[cell.name] = None
                continue
            if record is None:
                busy.append(cell)
                continue
            assert record.key == cell.key, f"{cell.name}: the worker's plan differs"
            done[cell.name] = record
        todo, wait = [cell for cell in todo if cell in busy], True
    return done


def put_grid(plan: Plan, store: Store, sink: Sink) -> None:
    """Say what the folder is of from now on; records under other keys stay where they are."""
    try:
        other = store.has_grid() and store.grid().cells != plan.grid.cells
    except NewerSchemaError:
        raise
    except ResultsError as error:  # damaged or old: written anew
        sink.say(str(error))
        other = False
    if other:
        sink.say(
            f"{store.directory} held results of other settings or versions; their records stay, "
            "its tables now show this run's (say --out to keep both)"
        )
    store.put_grid(plan.grid)


def _without_distributions(cells: Sequence[Cell], store: Store) -> set[str]:
    """Unquantized cells to score again, because cells that are still to run measure against
    their distributions, and those are gone."""
    needed = {
        cell.base.key
        for cell in cells
        if cell.base is not None
        and ((record := store.whole(cell.place)) is None or not _complete(record))
    }
    folder = distributions_folder()
    return {
        cell.name
        for cell in cells
        if cell.key in needed and not base_rows_usable(base_rows_file(folder, cell.key), cell.key)
    }


def run_if_needed(
    cell: Cell, plan: Plan, store: Store, sink: Sink, *, force: bool, wait: bool
) -> Record | None:
    """The cell's good record, made now if need be; None where another run is at work on it and
    ``wait`` is false."""
    try:
        with FileLock(store.lock_file(cell.place), timeout=-1 if wait else 0):
            known = store.whole(cell.place, sink.say)
            sink.begin(cell.name)
            try:
                whole = known is not None and _complete(known, cell, store)
                if whole and (wait or not force):
                    sink.say(f"{cell.name}: already there")
                    return known
                record = run(cell, plan, store, sink)
                sink.say(summary(record), "bold red" if record.status == "failed" else "")
                return record
            finally:
                sink.end(cell.name)
    except Timeout:
        sink.say(f"{cell.name}: another run is at work on it; later")
        return None


def _complete(record: Record, cell: Cell | None = None, store: Store | None = None) -> bool:
    """Whether a record is good, and has the damage that can be had by now."""
    if record.status != "ok":
        return False
    again = isinstance(record.damage, Unavailable) and record.damage.retry
    if not again or cell is None or store is None:
        return not again
    assert cell.base is not None
    base = store.whole(cell.base)
    key = cell.base.key
    present = base_rows_usable(base_rows_file(distributions_folder(), key), key)
    return base is None or base.status != "ok" or not present


def summary(record: Record) -> str:
    """One line on what a cell gave and what it cost."""
    if record.status == "failed":
        return f"{record.cell}: FAILED: {record.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in record.stages)
    proof = ""
    if record.audit is not None and record.quantized:
        proof = (
            f"; {record.audit.bits_per_weight:.2f} bits a weight, "
            f"weight error {record.audit.weight_error:.3f}"
        )
    return f"{record.cell}: done ({cost}{proof})"


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
