"""The loop over a grid: which cells are there already, and who runs the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed

from filelock import FileLock, Timeout

from qbench.evaluation.watch import distributions_file
from qbench.plan import Cell, Plan
from qbench.progress import Sink
from qbench.record import Record
from qbench.run import distributions_folder, failed, run
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
) -> list[Record]:
    """Run the cells that have no good record, through any ``concurrent.futures`` executor.

    ``work(name, force, wait)`` runs one cell where the executor puts it. Cells that another run
    is at work on come last, when that run has finished them. Returns the records in order.
    """
    store.put_grid(plan.grid)
    done: dict[str, Record] = {}
    todo, wait = list(cells), False
    again = _without_distributions(cells, store)
    while todo:
        futures: dict[Future, Cell] = {}
        for cell in todo:
            forced = force or cell.name in again
            futures[executor.submit(work, cell.name, forced, wait)] = cell
        busy = []
        for future in as_completed(futures):
            cell = futures[future]
            record = _result(future, cell, plan, store, sink)
            if record is None:
                busy.append(cell)
            else:
                done[cell.name] = record
        todo, wait = [cell for cell in todo if cell in busy], True
    return [done[cell.name] for cell in cells]


def _without_distributions(cells: Sequence[Cell], store: Store) -> set[str]:
    """Unquantized cells to score again, because cells that are still to run measure against
    their distributions, and those are gone."""
    needed = {
        cell.base.key
        for cell in cells
        if cell.base is not None
        and ((record := store.get(cell.place)) is None or record.status != "ok")
    }
    folder = distributions_folder()
    return {
        cell.name
        for cell in cells
        if cell.key in needed and not distributions_file(folder, cell.key).is_file()
    }


def run_if_needed(
    cell: Cell, plan: Plan, store: Store, sink: Sink, *, force: bool, wait: bool
) -> Record | None:
    """The cell's good record, made now if need be; None where another run is at work on it and
    ``wait`` is false."""
    try:
        with FileLock(store.lock_file(cell.place), timeout=-1 if wait else 0):
            known = store.get(cell.place)
            sink.begin(cell.name)
            try:
                if known is not None and known.status == "ok" and (wait or not force):
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


def summary(record: Record) -> str:
    """One line on what a cell gave and what it cost."""
    if record.status == "failed":
        return f"{record.cell}: FAILED: {record.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in record.stages)
    proof = ""
    if record.audit is not None and record.bits is not None:
        proof = (
            f"; {record.audit.bits_per_weight:.2f} bits a weight, "
            f"weight error {record.audit.weight_error:.3f}"
        )
    return f"{record.cell}: done ({cost}{proof})"


def _result(future: Future, cell: Cell, plan: Plan, store: Store, sink: Sink) -> Record | None:
    try:
        record = future.result()
        assert record is None or record.key == cell.key, f"{cell.name}: the worker's plan differs"
        return record
    except AssertionError:
        raise
    except Exception as error:  # the worker itself died: run() turns every other error to a record
        record = failed(cell, plan, f"the worker process died: {error}")
        store.put(record, None, None)
        sink.say(summary(record), "bold red")
        return record
