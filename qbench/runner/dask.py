"""Run cells on many machines through Dask: a client, and workers of one thread each. All workers
must see the results folder and the cache."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# read when distributed is imported, by the workers of this host too
os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")

import distributed
from distributed import Client, KilledWorker, get_worker
from distributed import Future as DaskFuture
from distributed.client import ClosedClientError
from distributed.worker import Worker

from qbench.errors import RecipeError, UnavailableError, first_line
from qbench.files import clean_temporaries, code_digest, temporary
from qbench.machine import (
    KERNEL_PACKAGES,
    broken_device,
    cuda_problem,
    hardware,
    tidy_memory_seldom,
    versions,
)
from qbench.progress import Progress
from qbench.runner.progress import RemoteProgress, pass_on
from qbench.runner.workers import LostExecutorError

GPU = "GPU"  # a resource that workers may declare
SECONDS_TO_CONNECT = 20.0
SECONDS_FOR_A_WORKER = 120.0
LOST = "the cluster was lost: its scheduler died or was restarted; start it and run again"
LIBRARIES = (
    "triton", "bitsandbytes", "hqq", "gptqmodel", "optimum", "torchao", "accelerate",
    *KERNEL_PACKAGES,
)  # fmt: skip

for name in ("distributed", "distributed.client", "distributed.gc"):  # each has its own level
    logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def connected(
    address: str, device: str | None, *, folders: Sequence[Path]
) -> Iterator[DaskExecutor]:
    """Yield an executor over the Dask workers of ``address``: ``tcp://HOST:PORT`` or a scheduler
    file.

    ``device`` "cpu" or "cuda"; None: the GPU if the workers have one. Every worker must see the
    ``folders``, which are made if they do not exist. Raises UnavailableError if no scheduler
    answers, if there is no worker, or one that does not suit, and RecipeError for another address.
    """
    with ExitStack() as stack:
        client = stack.enter_context(_connect(address))
        try:
            client.wait_for_workers(1, timeout=SECONDS_FOR_A_WORKER)
        except (TimeoutError, distributed.TimeoutError):
            raise UnavailableError(
                f"--cluster: no worker in {SECONDS_FOR_A_WORKER:.0f} s; start one, such as `dask "
                "worker ADDRESS --nthreads 1`"
            ) from None
        tokens = tuple(stack.enter_context(_token(folder)) for folder in folders)
        workers = client.run(_by_value(describe), tokens, device, on_error="return")
        for worker, about in workers.items():
            if isinstance(about, BaseException):
                raise UnavailableError(
                    f"--cluster: install the same qbench and packages on worker {worker}, which "
                    f"failed with {type(about).__name__}: {about}; for other errors see its log"
                )
        gpus = {about["GPU"] for about in workers.values()} - {None}
        device = device or ("cuda" if gpus else "cpu")
        if device == "cuda" and len(gpus) != 1:
            kinds = f"{len(gpus)} kinds of GPU, whose scores could differ" if gpus else "no GPU"
            raise UnavailableError(
                f"--cluster: its workers have {kinds}; use workers with one kind, or --device cpu"
            )
        expected = requirements(tokens, next(iter(gpus)) if device == "cuda" else None)
        for worker, about in workers.items():
            require_fit(worker, about, expected)
        info = client.scheduler_info(n_workers=-1)
        declared = any(
            GPU in (worker.get("resources") or {}) for worker in info["workers"].values()
        )
        yield DaskExecutor(
            client=client,
            expected=expected,
            tokens=tokens,
            resources={GPU: 1} if device == "cuda" and declared else None,
            device=device,
            description=f"cluster {info['address']}: {len(workers)} workers; dashboard "
            f"{client.dashboard_link}",
        )


def _connect(address: str) -> Client:
    """Return a client of the scheduler at ``address``. Raises RecipeError or UnavailableError."""
    scheduler = address
    if "://" not in address:
        if not Path(address).is_file():
            raise RecipeError(
                f"--cluster {address}: no such scheduler file; write tcp://HOST:PORT, or --workers "
                "N for processes of this host"
            )
        try:
            scheduler = json.loads(Path(address).read_bytes())["address"]
        except (ValueError, TypeError, KeyError):
            raise UnavailableError(
                f"--cluster {address}: not a scheduler file; name the one that `dask scheduler "
                "--scheduler-file` wrote"
            ) from None
    try:
        return Client(scheduler, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnavailableError(
            f"--cluster {address}: no scheduler answers there ({first_line(error)}); start one "
            "with `dask scheduler`"
        ) from None


@contextmanager
def _token(folder: Path) -> Iterator[str]:
    """Yield the path of a new file in ``folder``, by which workers show that they see the folder.
    Files of killed runs are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    clean_temporaries(folder)
    token = temporary(folder.resolve() / secrets.token_hex(8))
    token.touch()
    try:
        yield str(token)
    finally:
        token.unlink(missing_ok=True)


def requirements(tokens: Sequence[str], gpu: str | None) -> dict[str, Any]:
    """Return, by name, what every worker must have: otherwise its cells would have other keys, or
    it could not write them. ``tokens``: files that it must see; ``gpu``: name of the GPU, None on a
    CPU."""
    seen = {f"access to {Path(token).parent}": True for token in tokens}
    return {"threads": 1, "qbench's code": code_digest(), "GPU": gpu, **versions(LIBRARIES), **seen}


def describe(tokens: Sequence[str], device: str | None, worker: Worker) -> dict[str, Any]:
    """Return the same values as :func:`requirements`, of the worker on which this runs; ``device``
    None: with its GPU if it has one."""
    gpu = hardware("cuda") if device != "cpu" and cuda_problem() is None else None
    seen = {f"access to {Path(token).parent}": Path(token).is_file() for token in tokens}
    return requirements(tokens, gpu) | {"threads": worker.state.nthreads} | seen


def require_fit(worker: str, about: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise UnavailableError if a value in ``about``, the worker's, is not the expected one."""
    for name, value in expected.items():
        if about.get(name) != value:
            raise UnavailableError(
                f"--cluster: worker {worker} has {name} {about.get(name)}, the run needs {value}; "
                "install the same everywhere, start workers with --nthreads 1, and let all see "
                "--out and $QBENCH_CACHE"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class DaskExecutor(Executor):
    """An executor over the workers of ``client``, which the caller closes. If a worker dies, Dask
    runs its call again, and fails the call's future after several deaths."""

    client: Client
    expected: dict[str, Any]
    tokens: tuple[str, ...]
    resources: dict[str, int] | None
    device: str
    description: str

    @contextmanager
    def listen(self, progress: Progress) -> Iterator[RemoteProgress]:
        """Yield a RemoteProgress for cells on workers; Dask's events pass its calls to ``progress``
        before a call's result arrives."""
        topic = f"qbench-{secrets.token_hex(4)}"
        self.client.subscribe_topic(topic, lambda event: pass_on(progress, *event[1]))
        try:
            yield RemoteProgress(LogEvent(topic))
        finally:
            with suppress(ClosedClientError):  # the cluster was lost
                self.client.subscribe_topic(topic, lambda event: None)  # of workers that go on
                self.client.unsubscribe_topic(topic)

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Call ``fn`` on a worker of the cluster; return its concurrent future, which raises
        BrokenExecutor if workers died under the call. ``fn``, arguments and result are pickled.
        Raises LostExecutorError if the scheduler is gone."""
        if self.client.status != "running":
            raise LostExecutorError(LOST)
        payload = pickle.dumps((self.expected, self.tokens, pickle.dumps((fn, args, kwargs))))
        task = self.client.submit(
            _by_value(run_here), payload,
            key=f"cell-{secrets.token_hex(8)}", pure=False, resources=self.resources,
        )  # fmt: skip
        future: Future = Future()
        task.add_done_callback(functools.partial(_settle, future))
        return future


def _settle(future: Future, task: DaskFuture) -> None:
    """Copy result or error of ``task`` to ``future``, and release the task: otherwise Dask would
    run it again if its worker died later."""
    try:
        future.set_result(task.result())
    except KilledWorker as error:
        future.set_exception(BrokenExecutor(str(error)))
    except CancelledError:  # all are, where the connection is lost
        future.set_exception(LostExecutorError(LOST))
    except BaseException as error:
        future.set_exception(error)
    finally:
        task.release()


def run_here(payload: bytes, worker: Worker) -> Any:
    """Run the pickled call on this worker and return its result. Raises UnavailableError if the
    worker, which may have joined later, does not suit the run; ends the process if its GPU is
    broken, and Dask starts another."""
    if broken_device() is not None:
        os._exit(1)  # its nanny starts another process, where Dask runs the call again
    tidy_memory_seldom()
    expected, tokens, call = pickle.loads(payload)
    device = "cuda" if expected["GPU"] else "cpu"
    require_fit(worker.address, describe(tokens, device, worker), expected)
    function, args, kwargs = pickle.loads(call)
    return function(*args, **kwargs)


def _by_value(function: Callable) -> Callable:
    """Return a function that imports and calls ``function`` with the worker as last argument. It
    can be unpickled without qbench, which the scheduler need not have."""
    module, name = function.__module__, function.__name__

    def call(*arguments: Any, dask_worker: Worker | None = None) -> Any:
        worker = dask_worker or get_worker()  # of ``Client.run``, or of a task
        return getattr(importlib.import_module(module), name)(*arguments, worker)

    return call


@dataclass
class LogEvent:
    """Sends messages to the run through the scheduler: workers need not reach the run's host."""

    topic: str
    worker: Any = None  # set at the first use: other threads of the worker cannot look it up

    def __call__(self, message: tuple[Any, ...]) -> None:
        with suppress(ValueError):
            self.worker = self.worker or get_worker()
        if self.worker is not None:
            self.worker.log_event(self.topic, list(message))
