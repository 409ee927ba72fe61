"""Cells on a Dask cluster, as an executor of ``concurrent.futures`` that a grid can be given.

Each cell has a thread here, which holds the cell's lock, sends what a worker lacks, tries again
where a worker died, and writes the record that comes back: workers write into no results folder.
No more cells are with the cluster than it has workers, so that none waits on a worker that dies.
"""

from __future__ import annotations

import pickle
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from concurrent.futures import ThreadPoolExecutor as Threads
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from qbench.cluster.events import EventRelay, Topic
from qbench.cluster.located import Wanted
from qbench.cluster.remote import (
    Base,
    Missing,
    Refused,
    Returned,
    artifact_here,
    forget,
    log_here,
    rows_here,
    run_remote,
)
from qbench.cluster.transfer import Transfers
from qbench.cluster.workers import Workers
from qbench.files import digest
from qbench.plan import Cell, content_key
from qbench.record import Record
from qbench.run import failed as failed_record
from qbench.run import one_line
from qbench.running.work import Work, complete
from qbench.sink import Sink
from qbench.store import Store

if TYPE_CHECKING:
    from distributed import Client

MOST_DEATHS = 3  # of workers, until the cell is the cause
MOST_CELLS = 512  # with the cluster at once
SECONDS_BETWEEN_LOOKS = 2.0


class ClusterExecutor(Executor):
    """Runs ``Work`` on the workers of ``client``. The caller closes the client."""

    def __init__(self, client: Client, workers: Workers) -> None:
        self._client, self._workers = client, workers
        self._threads = Threads(MOST_CELLS, thread_name_prefix="cell")
        self._relay: EventRelay | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}  # key of a cell → it is done
        self._plans: dict[int, Any] = {}
        self._transfers = Transfers(workers.ask, self._say)

    def relay(self, sink: Sink) -> AbstractContextManager[EventRelay]:
        self._relay = EventRelay(self._client, f"qbench-{secrets.token_hex(4)}", sink)
        self._workers.tell(self._say)
        return self._relay

    def rows_problem(self, key: str) -> str | None:
        return None if self._rows(key) else "no worker has its rows"

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """``fn`` is a Work, ``args`` the name of one of its cells."""
        if not isinstance(fn, Work):
            raise TypeError(f"a cluster runs cells of a plan, not {fn!r}")
        key = fn.plan.cell(args[0]).key
        with self._lock:
            self._running[key] = threading.Event()
        return self._threads.submit(self._cell, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._ended.set()
        self._threads.shutdown(wait=wait and not cancel_futures, cancel_futures=cancel_futures)

    def _cell(self, work: Work, name: str, *, force: bool, wait: bool) -> Record | None:
        cell, store = work.plan.cell(name), Store(work.out)
        try:
            self._wait_for_base(cell)
            with FileLock(store.lock_file(cell.grid_cell), timeout=-1 if wait else 0):
                known = store.whole(cell.grid_cell, self._say)
                if not force and complete(known, cell, store, self.rows_problem):
                    self._say(f"{name}: already there")
                    return known
                return self._until_done(work, cell, store, force)
        except Timeout:
            self._say(f"{name}: another run is at work on it; later")
            return None
        finally:
            self._running[cell.key].set()

    def _wait_for_base(self, cell: Cell) -> None:
        """What a cell is measured against comes first, where it is of this run."""
        base = self._running.get(cell.base.key) if cell.base else None
        while base is not None and not base.wait(SECONDS_BETWEEN_LOOKS):
            self._stop_if_ended()

    def _until_done(self, work: Work, cell: Cell, store: Store, force: bool) -> Record:
        with self._workers.slot(self._ended), self._quantized_once(cell):
            deaths, avoided = 0, set()
            while True:
                try:
                    found = self._try(work, cell, store, force, avoided)
                except BrokenExecutor:
                    raise
                except Exception as problem:  # on the worker, before the cell began
                    error = one_line(problem, store.log(cell.grid_cell))
                    return store.put(failed_record(cell, work.plan, error), None, None)
                if isinstance(found, Returned):
                    record = store.adopt(found.record, found.tables, found.log)
                    self._forget(found.worker, cell)
                    return record
                if isinstance(found, Missing):
                    self._send(found)
                    continue
                deaths += found.deaths
                if deaths >= MOST_DEATHS:
                    self._take_log(cell, store)
                    raise BrokenExecutor(found.reason)
                self._say(f"{cell.name}: {found.reason}; once more elsewhere", "bold red")
                if found.full:
                    avoided.add(found.worker)

    def _try(
        self, work: Work, cell: Cell, store: Store, force: bool, avoided: set[str]
    ) -> Returned | Missing | Refused:
        from distributed import KilledWorker

        assert self._relay is not None
        attempt = secrets.token_hex(4)
        topic = Topic(run=self._relay.run, cell=cell.name, attempt=attempt, most_deaths=MOST_DEATHS)
        self._relay.expect(attempt)
        future = self._client.submit(
            run_remote, self._plan(work), cell.name, topic=topic, force=force,
            base=self._base(cell, store), artifact=self._artifact_elsewhere(cell),
            key=f"{cell.name}-{attempt}", pure=False,
            workers=self._workers.allowed(avoided), resources=self._workers.resources(cell),
        )  # fmt: skip
        returned = False
        try:
            found = self._result(future, avoided)
            returned = isinstance(found, Returned)
            return found
        except KilledWorker as error:
            # a cell that waited on a worker that another killed never began
            deaths = len(self._client.get_events(topic.marks) or ())
            return Refused(worker=str(error.last_worker), reason="its worker died", deaths=deaths)
        except CancelledError as error:
            raise BrokenExecutor("the cluster was lost") from error
        finally:
            # else it would be run again where its worker dies before its result is let go
            future.release()
            self._relay.settle(attempt, wait=returned)

    def _result(self, future: Any, avoided: set[str]) -> Returned | Missing | Refused:
        from distributed import TimeoutError as Later

        while True:
            try:
                return future.result(timeout=SECONDS_BETWEEN_LOOKS)
            except Later:
                if self._ended.is_set() or not self._workers.reachable:
                    future.cancel()
                    raise BrokenExecutor("the cluster was lost") from None
                if self._workers.none_left(avoided):
                    future.cancel()
                    raise BrokenExecutor("no worker is left that could run it") from None

    def _take_log(self, cell: Cell, store: Store) -> None:
        """What the cell had printed when its worker died, where a cache still has it."""
        for text in self._workers.ask_all(log_here, cell.grid_cell).values():
            if text:
                store.log(cell.grid_cell).write_text(text)

    def _forget(self, worker: str, cell: Cell) -> None:
        with suppress(OSError):  # what stays there is found again, and is the same
            self._workers.ask(worker, forget, cell.grid_cell)

    def _plan(self, work: Work) -> Any:
        """The plan as a result of the cluster's: kept where it is used, made anew where lost."""
        with self._lock:
            if id(work) not in self._plans:
                pickled = pickle.dumps((work.plan.plugins, pickle.dumps(work.plan)))
                self._plans[id(work)] = self._client.submit(
                    bytes, pickled, key=f"plan-{digest(pickled)[:16]}"
                )
            return self._plans[id(work)]

    def _base(self, cell: Cell, store: Store) -> Base | None:
        record = store.whole(cell.base) if cell.base else None
        if cell.base is None or record is None or record.status != "ok":
            return None
        files = store.files_of(record)
        name = digest("".join(f.sha256 for f in record.files.values()).encode())[:16]
        wanted = Wanted(f"files/record-{name}", tuple((path.name, str(path)) for path in files))
        found = self._rows(cell.base.key)
        return Base(cell=cell.base, record=wanted, rows=found[1] if found else None)

    def _rows(self, key: str) -> tuple[str, str] | None:
        """A worker that has the rows, and the folder of its cache that they are in."""
        for worker, target in self._workers.ask_all(rows_here, key).items():
            if target is not None:
                return worker, target
        return None

    def _artifact_elsewhere(self, cell: Cell) -> str | None:
        """Where some worker's cache has the quantized weights of the cell already."""
        if not cell.quantizer.precision.quantized:
            return None
        settings = cell.quantizer.settings
        found = self._workers.ask_all(artifact_here, cell.checkpoint.digest, settings)
        return next((folder for folder in found.values() if folder is not None), None)

    def _send(self, missing: Missing) -> None:
        host = self._workers.host(missing.worker)
        try:
            for wanted in missing.wanted:
                self._transfers.send(wanted, missing.worker, host.cache, host.name)
            for target in missing.passed:
                origin = self._workers.with_folder(target)
                if origin is not None:
                    self._transfers.pass_on(target, origin, missing.worker, host.cache, host.name)
        except OSError as error:
            if not self._workers.reachable:
                raise BrokenExecutor("the cluster was lost") from error
            # the worker is gone, or has no room: whoever is next says what it lacks

    @contextmanager
    def _quantized_once(self, cell: Cell) -> Any:
        """Cells of any run that quantize the same do so one after the other."""
        if not cell.quantizer.precision.quantized:
            yield
            return
        from distributed import Lock

        lock = Lock(
            f"qbench-{_artifact(cell)}",
            scheduler_rpc=self._client.scheduler,
            loop=self._client.loop,
        )
        while not lock.acquire(timeout=SECONDS_BETWEEN_LOOKS):
            self._stop_if_ended()
        try:
            yield
        finally:
            with suppress(OSError, RuntimeError):
                lock.release()

    def _stop_if_ended(self) -> None:
        if self._ended.is_set():
            raise BrokenExecutor("the run was ended")
        if not self._workers.reachable:
            raise BrokenExecutor("the cluster was lost")

    def _say(self, line: str, style: str = "") -> None:
        if self._relay is not None:
            self._relay.say(line, style)


def _artifact(cell: Cell) -> str:
    parts = {name: cell.key_parts.get(name) for name in (
        "weights", "normalizer", "quantizer", "calibration", "attention", "device", "gpu",
        "versions", "code",
    )}  # fmt: skip
    return content_key(parts)[:16]
