"""Where cells run: in this process, or side by side in processes that each see one GPU.

Both speak the standard ``concurrent.futures.Executor`` interface, so that a cluster's executor
can take their place without the runner knowing.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.overrides import Overrides
from qbench.record import Record
from qbench.running.progress import Sender, Sink

if TYPE_CHECKING:
    from qbench.plan import Cell, Plan
    from qbench.store import Store

CELLS_A_GPU = 3  # quantization of one cell overlaps with the scoring of others


class SerialExecutor(Executor):
    """Runs each call when it is submitted, in this process."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All that a worker process needs to make the same plan as its parent."""

    recipe: Path
    overrides: Overrides
    out: Path
    device: str

    def plan(self):
        from qbench.plan import plan
        from qbench.recipe import Recipe

        return plan(Recipe.load(self.recipe, self.overrides), device=self.device)


def run_cells(
    plan: Plan, job: Job, sink: Sink, *, cells: Sequence[Cell], slots: list[int], force: bool
) -> list[Record]:
    """Run ``cells`` in this process, or in one process a slot; their records in order."""
    from qbench.running.grid import put_grid, run_grid, run_if_needed
    from qbench.store import Store

    store = Store(job.out)
    put_grid(plan, store, sink)
    if slots:
        done = _run_in_processes(plan, job, store, sink, in_order(cells), slots, force)
        return [done[cell.name] for cell in cells]
    named = {cell.name: cell for cell in cells}

    def here(name: str, force: bool, wait: bool) -> Record | None:
        return run_if_needed(named[name], plan, store, sink, force=force, wait=wait)

    done = run_grid(
        plan, store, sink, cells=cells, executor=SerialExecutor(), work=here, force=force
    )
    return [done[cell.name] for cell in cells]


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """For cells side by side: what others wait for first, then what takes longest, which is exact
    scoring where others are scored fast, then calibration."""
    return sorted(
        cells,
        key=lambda cell: (
            cell.base is not None,
            cell.scoring.mode == "fast",
            not cell.quantizer.needs_calibration,
        ),
    )


def _run_in_processes(
    plan: Plan,
    job: Job,
    store: Store,
    sink: Sink,
    cells: Sequence[Cell],
    slots: list[int],
    force: bool,
) -> dict[str, Record]:
    """The cells' records. Where a worker process dies, what is left goes on one cell at a time,
    so that only the cell that kills its process fails."""
    from qbench.run import failed
    from qbench.running.grid import run_grid, summary

    done: dict[str, Record] = {}
    todo = list(cells)
    while todo:
        with processes(job, slots, sink) as (executor, work):
            found = run_grid(
                plan, store, sink, cells=todo, executor=executor, work=work, force=force
            )
        done |= {name: record for name, record in found.items() if record is not None}
        todo = [cell for cell in todo if cell.name not in done]
        if todo and len(slots) == 1:
            record = failed(todo[0], plan, "its process was killed (out of memory?); see its log")
            record = store.put(record, None, None)
            sink.say(summary(record), "bold red")
            done[todo.pop(0).name] = record
        elif todo:
            sink.say("a worker process died; going on one cell at a time", "bold red")
        slots = slots[:1]
    return done


@contextmanager
def processes(job: Job, slots: list[int], sink: Sink) -> Iterator[tuple[Executor, Callable]]:
    """An executor over one process a slot, and the work to submit to it."""
    context = multiprocessing.get_context("spawn")
    messages, free = context.Queue(), context.Queue()
    for gpu in slots:
        free.put(gpu)
    drawing = threading.Thread(target=_draw, args=(messages, sink), daemon=True)
    drawing.start()
    executor = ProcessPoolExecutor(
        max_workers=len(slots),
        mp_context=context,
        initializer=_settle_worker,
        initargs=(job, messages, free, max(1, (os.cpu_count() or 1) // len(slots))),
    )
    try:
        yield executor, _work
    except KeyboardInterrupt:
        for worker in context.active_children():
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
        messages.put(None)
        drawing.join()


def _draw(messages: Any, sink: Sink) -> None:
    while (message := messages.get()) is not None:
        method, arguments = message
        getattr(sink, method)(*arguments)


_WORKER: dict[str, Any] = {}


def _settle_worker(job: Job, messages: Any, free: Any, threads: int) -> None:
    gpu = free.get()
    # threads that wait for a core slow all of them down; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if job.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(n) for n in range(gpu + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[gpu]
    threading.Thread(target=end_with_parent, daemon=True).start()
    _WORKER.update(job=job, sink=Sender(messages))


def end_with_parent() -> None:
    """In a thread of a child: one whose parent was killed must not go on, with a GPU's memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@functools.cache
def _worker_plan():
    return _WORKER["job"].plan()


def _work(name: str, force: bool, wait: bool) -> Record | None:
    from qbench.running.grid import run_if_needed
    from qbench.store import Store

    plan = _worker_plan()
    (cell,) = [cell for cell in plan.cells if cell.name == name]
    store, sink = Store(_WORKER["job"].out), _WORKER["sink"]
    return run_if_needed(cell, plan, store, sink, force=force, wait=wait)
