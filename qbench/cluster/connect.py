"""From ``--cluster`` to an executor: a scheduler that runs already, or workers of this host."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.cluster.executor import MOST_DEATHS, ClusterExecutor
from qbench.cluster.workers import GPU, MEMORY, Workers
from qbench.errors import RecipeError, UnavailableError

if TYPE_CHECKING:
    from distributed import Client

LOCAL = "local"
SECONDS_TO_CONNECT = 20.0
SECONDS_FOR_A_WORKER = 120.0
PATIENCE = 600.0  # seconds without a single worker
FROZEN = "60s"  # without a sign of life, a worker of this host is given up
LOCKED = "12s"  # after a run was killed, what it was quantizing; else renewed every few seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """An open cluster: what its workers compute on, and the executor over them."""

    executor: ClusterExecutor
    workers: Workers
    address: str
    dashboard: str

    @property
    def description(self) -> str:
        return f"cluster {self.address}: {self.workers.summary()}; dashboard {self.dashboard}"


@contextmanager
def connected(
    address: str, device: str | None, *, slots: list[int] | None = None
) -> Iterator[Cluster]:
    """The cluster ``address``: ``tcp://HOST:PORT``, a scheduler file, ``local`` or ``local:N``.

    ``device`` None: what the workers have. ``slots``: the GPU of each local worker. Raises
    UnavailableError where there is none or no worker fits, RecipeError for another address.
    """
    _quieten()
    with ExitStack() as stack:
        import dask

        stack.enter_context(dask.config.set({"distributed.scheduler.locks.lease-timeout": LOCKED}))
        if address.partition(":")[0] == LOCAL:
            client = _local(address, slots or [], device, stack)
        else:
            client = _connect(address, stack)
        workers = Workers(client, device, patience=PATIENCE)
        stack.callback(workers.close)
        workers.require(SECONDS_FOR_A_WORKER)
        executor = ClusterExecutor(client, workers)
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        yield Cluster(
            executor=executor,
            workers=workers,
            address=client.scheduler_info(n_workers=0)["address"],
            dashboard=client.dashboard_link,
        )


def local_workers(address: str) -> int | None:
    """N of ``local:N``; None for ``local``. Raises RecipeError for another."""
    _, colon, number = address.partition(":")
    if not colon:
        return None
    if not number.isdecimal() or not 1 <= int(number) <= 1024:
        raise RecipeError(f"--cluster {address}: write local:N with N workers, from 1 to 1024")
    return int(number)


def require_dask() -> None:
    """Raise UnavailableError where the extra is not installed."""
    if importlib.util.find_spec("distributed") is None:
        raise UnavailableError("--cluster: Dask is not installed; pip install 'qbench[cluster]'")


def _quieten() -> None:
    """What happens to workers is said by us, in a line."""
    # read when distributed is imported, by the workers of this host too
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")
    import distributed  # noqa: F401  its import sets up its loggers

    logging.getLogger("distributed").setLevel(logging.CRITICAL)


def _connect(address: str, stack: ExitStack) -> Client:
    from distributed import Client

    arguments: dict[str, Any] = {"address": address}
    if "://" not in address:
        if not Path(address).is_file():
            raise RecipeError(
                f"--cluster {address}: no such scheduler file; write tcp://HOST:PORT, the path of "
                "a scheduler file, or local:N"
            )
        arguments = {"scheduler_file": address}
    try:
        client = Client(**arguments, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnavailableError(
            f"--cluster {address}: no scheduler answers there ({reason[0]}); start one with "
            "`dask scheduler`"
        ) from None
    return stack.enter_context(client)


def _local(address: str, slots: list[int], device: str | None, stack: ExitStack) -> Client:
    """Processes of this host, one thread each; on GPUs each sees one."""
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster

    count = local_workers(address)
    gpus: list[int | None] = list(slots[:count] if slots else [])
    if not gpus:
        gpus = [None] * (count or 1)
    threads = max(1, (os.cpu_count() or 1) // len(gpus))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(gpus)
    settings = {
        "distributed.scheduler.allowed-failures": MOST_DEATHS - 1,
        "distributed.scheduler.worker-ttl": FROZEN,
    }
    stack.enter_context(dask.config.set(settings))
    options = [_options(gpu, threads, memory) for gpu in gpus]
    cluster = SpecCluster(
        workers={n: {"cls": Nanny, "options": one} for n, one in enumerate(options)},
        scheduler={"cls": Scheduler, "options": {
            "dashboard_address": "127.0.0.1:0", "host": "127.0.0.1", "protocol": "tcp"}},
        silence_logs="CRITICAL",
    )  # fmt: skip
    stack.enter_context(cluster)
    return stack.enter_context(Client(cluster, set_as_default=False))


def _options(gpu: int | None, threads: int, memory: float) -> dict[str, Any]:
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    resources: dict[str, float] = {MEMORY: memory}
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(n) for n in range(gpu + 1)]
        environment["CUDA_VISIBLE_DEVICES"] = devices[gpu]
        resources[GPU] = 1
    return {
        "nthreads": 1,
        "memory_limit": 0,  # a cell's memory is its own affair
        "env": environment,
        "resources": resources,
    }
