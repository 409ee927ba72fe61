"""Cells on a Dask cluster, as an executor of ``concurrent.futures`` that a grid can be given.

Each cell has a thread here, which holds the cell's lock, sends what a worker lacks, tries again
where a worker died, and writes the record that comes back: workers write into no results folder.
No more cells are with the cluster than it has workers, so that none waits on a worker that dies.
"""

from __future__ import annotations

import pickle
import secrets
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from concurrent.futures import ThreadPoolExecutor as Threads
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from qbench.cell import one_line
from qbench.cluster.events import EventRelay, Topic
from qbench.cluster.kept import Alone, Kept, stages_of
from qbench.cluster.located import Wanted
from qbench.cluster.remote import BaseThere, Call, Missing, Refused, Returned, forget, log_here
from qbench.cluster.transfer import Transfers
from qbench.cluster.workers import Workers
from qbench.files import digest
from qbench.plan import Cell, Plan
from qbench.progress import Progress
from qbench.running.units import Unit

if TYPE_CHECKING:
    from distributed import Client

MOST_DEATHS = 3  # of workers, until the cell is the cause
MOST_CELLS = 512  # with the cluster at once
SECONDS_BETWEEN_LOOKS = 5.0
LOOKS_FOR_A_LOG = 10  # one a second
MOST_KEPT = 16  # records that a worker keeps after they have come here


class ClusterExecutor(Executor):
    """Runs the cells of a ``Unit`` on the workers of ``client``. The caller closes the client."""

    def __init__(self, client: Client, workers: Workers) -> None:
        self._client, self._workers = client, workers
        self._threads = Threads(MOST_CELLS, thread_name_prefix="cell")
        self._relay: EventRelay | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}  # cell → it is done
        # by their objects, which are kept: another plan could be made at its place in memory
        self._plans: dict[int, tuple[Plan, Any]] = {}
        self._bases: dict[str, BaseThere] = {}
        self._done: dict[str, list[str]] = {}  # worker → what it still keeps of cells
        self._kept = Kept(workers.ask_all, workers.there)
        self._alone = Alone(client, self._stop_if_ended, self._say)
        self._transfers = Transfers(workers.ask, self._say)

    def relay(self, progress: Progress) -> AbstractContextManager[EventRelay]:
        self._relay = EventRelay(self._client, f"qbench-{secrets.token_hex(4)}", progress)
        self._workers.tell(self._say)
        return self._relay

    def rows_problem(self, key: str) -> str | None:
        return None if self._kept.rows(key) else "no worker has its rows"

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """``fn`` is a Unit, ``args`` the name of one of its cells."""
        if not isinstance(fn, Unit):
            raise TypeError(f"a cluster runs cells of a plan, not {fn!r}")
        with self._lock:
            self._running[args[0]] = threading.Event()
        return self._threads.submit(self._cell, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._ended.set()
            self._workers.end()
        self._threads.shutdown(wait=wait and not cancel_futures, cancel_futures=cancel_futures)
        with self._lock:
            done, self._done = self._done, {}
        left = [(worker, forget, (kept,)) for worker, kept in done.items()]
        self._workers.post(left, seconds=SECONDS_BETWEEN_LOOKS)

    def _cell(self, unit: Unit, name: str, *, force: bool = False, wait: bool = True) -> Any:
        cell, lock = unit.plan.cell(name), FileLock(unit.lock_file(name), timeout=-1 if wait else 0)
        try:
            self._wait_for(unit.awaits(name))
            with ExitStack() as stack:
                if wait:  # for another run, without a worker
                    stack.enter_context(lock)
                stages = stages_of(cell, unit.plan)
                stack.enter_context(self._alone.here(stages))
                stack.enter_context(self._workers.slot())
                if not wait:  # not before: what only waits in line is free for other runs
                    stack.enter_context(lock)
                known = None
                if not force:
                    known = unit.known(name, say=self._say, problem=self.rows_problem)
                if known is not None:
                    self._say(f"{name}: already there")
                    return known
                return self._until_done(unit, cell, stages, force)
        except Timeout:
            self._say(f"{name}: another run is at work on it; later")
            return None
        finally:
            self._running[name].set()

    def _wait_for(self, name: str | None) -> None:
        """What a cell is measured against comes first, where it is of this run."""
        awaited = self._running.get(name) if name else None
        while awaited is not None and not awaited.wait(SECONDS_BETWEEN_LOOKS):
            self._stop_if_ended()

    def _until_done(self, unit: Unit, cell: Cell, stages: Sequence[str], force: bool) -> Any:
        with self._alone.everywhere(cell.name, stages) as waited:
            artifacts = self._kept.artifacts(cell, stages, anew=waited)
            deaths, avoided, nowhere = 0, set(), set()
            while True:
                try:
                    found = self._try(unit, cell, force, avoided, set(artifacts) - nowhere)
                    if isinstance(found, Missing):
                        nowhere |= self._send(found)
                        continue
                except BrokenExecutor:
                    raise
                except Exception as problem:  # before the cell began
                    return unit.failed(cell.name, one_line(problem, unit.log_file(cell.name)))
                if isinstance(found, Returned):
                    return self._take(unit, cell, found)
                deaths += found.deaths
                if deaths >= MOST_DEATHS:
                    self._take_log(unit, cell.name)
                    raise BrokenExecutor(found.reason)
                self._say(f"{cell.name}: {found.reason}; once more elsewhere", "bold red")
                if found.full:
                    avoided.add(found.worker)

    def _take(self, unit: Unit, cell: Cell, found: Returned) -> Any:
        record = unit.adopt(cell.name, found.made)
        self._kept.learn(found.artifacts)
        kept = [unit.kept(cell.name)]
        if cell.quantization.precision.quantized:
            with self._lock:
                self._done.setdefault(found.worker, []).extend(kept)
                if len(self._done[found.worker]) < MOST_KEPT:
                    return record
                kept = self._done.pop(found.worker)
        # of an unquantized cell at once: others put its record there again, to be measured against
        self._workers.post([(found.worker, forget, (kept,))])
        return record

    def _try(
        self, unit: Unit, cell: Cell, force: bool, avoided: Set[str], artifacts: Set[str]
    ) -> Returned | Missing | Refused:
        from distributed import KilledWorker

        assert self._relay is not None
        attempt = secrets.token_hex(4)
        topic = Topic(run=self._relay.run, cell=cell.name, attempt=attempt, most_deaths=MOST_DEATHS)
        self._relay.expect(attempt)
        call = Call(
            cell=cell.name, remote=unit.remote(cell.name), kept=unit.kept(cell.name), topic=topic,
            force=force, base=self._base(unit, cell), artifacts=tuple(sorted(artifacts)),
        )  # fmt: skip
        future = self._client.submit(
            _by_value(), self._plan(unit), pickle.dumps(call),
            key=("cell", cell.name, attempt), pure=False,  # one name for Dask to keep a record of
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

    def _result(self, future: Any, avoided: Set[str]) -> Returned | Missing | Refused:
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

    def _take_log(self, unit: Unit, name: str) -> None:
        """What the cell had printed when its worker died, where a cache still has it: workers that
        died are back after a moment."""
        for _ in range(LOOKS_FOR_A_LOG):
            texts = [t for t in self._workers.ask_all(log_here, unit.kept(name)).values() if t]
            if texts or self._ended.wait(1.0):
                break
        for text in texts:
            unit.log_file(name).write_text(text)

    def _plan(self, unit: Unit) -> Any:
        """The plan as a result of the cluster's: kept where it is used, made anew where lost."""
        with self._lock:
            plan = unit.plan
            if id(plan) not in self._plans:
                pickled = pickle.dumps((plan.plugins, pickle.dumps(plan)))
                sent = self._client.submit(bytes, pickled, key=f"plan-{digest(pickled)[:16]}")
                self._plans[id(plan)] = plan, sent
            return self._plans[id(plan)][1]

    def _base(self, unit: Unit, cell: Cell) -> BaseThere | None:
        if cell.base is None:
            return None
        if cell.base.key not in self._bases:
            found = unit.base(cell.name)
            if found is None:
                return None
            name = digest("".join(path.name for path in found.files).encode())[:16]
            record = Wanted(
                f"files/record-{name}", tuple((path.name, str(path)) for path in found.files)
            )
            self._bases[cell.base.key] = BaseThere(cell=cell.base, record=record, rows=None)
        rows = self._kept.rows(cell.base.key)
        return replace(self._bases[cell.base.key], rows=rows[1] if rows else None)

    def _send(self, missing: Missing) -> set[str]:
        """What is passed on and nobody has any more."""
        nowhere = set()
        try:
            host = self._workers.host(missing.worker)
            for wanted in missing.wanted:
                self._transfers.send(wanted, missing.worker, host.cache, host.name)
            for target in missing.passed:
                origin = self._workers.with_folder(target)
                if origin is None:
                    self._kept.lost(target)
                    nowhere.add(target)
                else:
                    self._transfers.pass_on(target, origin, missing.worker, host.cache, host.name)
        except OSError as error:
            if not self._workers.reachable:
                raise BrokenExecutor("the cluster was lost") from error
            # the worker is gone, or has no room: whoever is next says what it lacks
        return nowhere

    def _stop_if_ended(self) -> None:
        if self._ended.is_set():
            raise BrokenExecutor("the run was ended")
        if not self._workers.reachable:
            raise BrokenExecutor("the cluster was lost")

    def _say(self, line: str, style: str = "") -> None:
        if self._relay is not None:
            self._relay.log(line, style)


def _by_value() -> Callable[[bytes, bytes], Any]:
    """A function that is pickled whole, not by its name: the scheduler, which unpickles it, then
    loads nothing of qbench's, and need not have it."""

    def run(plan: bytes, call: bytes) -> Any:
        from qbench.cluster.remote import run_remote

        return run_remote(plan, call)

    return run
