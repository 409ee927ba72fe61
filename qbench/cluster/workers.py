"""The workers of a cluster: who is there, who fits, and what they are asked beside their cells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import BrokenExecutor, CancelledError, wait
from concurrent.futures import ThreadPoolExecutor as Threads
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from qbench.cluster.line import Line
from qbench.cluster.remote import Host, describe, here
from qbench.errors import UnavailableError
from qbench.plan import Cell

if TYPE_CHECKING:
    from distributed import Client

GPU, MEMORY = "GPU", "MEMORY"  # resources that workers may declare
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_FOR_AN_ANSWER = 5.0
SECONDS_FOR_A_PART = 120.0  # of a file
MOST_QUESTIONS = 64  # at once


class Workers:
    """The workers that run cells; looked at again and again, since they come and go.

    ``patience``: seconds to go on without a single worker.
    """

    def __init__(self, client: Client, device: str | None, *, patience: float) -> None:
        """``device`` None: GPUs where the workers have them."""
        self._client, self._patience = client, patience
        self._changed = threading.Condition()
        self._hosts: dict[str, Host] = {}  # those that fit
        self._unfit: dict[str, str] = {}  # the others, and why
        self._resources: dict[str, dict[str, float]] = {}
        self._ended = threading.Event()
        self._line = Line(lambda: len(self._hosts), self._require)
        self._seen = time.monotonic()
        self._say: Callable[..., None] | None = None
        self._device = device
        self._closed = threading.Event()
        self._asking = Threads(MOST_QUESTIONS, thread_name_prefix="question")
        self.look()
        if device is None and self._hosts:
            gpus = any(host.gpu for host in self._hosts.values())
            self._device = "cuda" if gpus else "cpu"
            self._drop_unfit()
        self._thread = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(SECONDS_FOR_AN_ANSWER)
        self._asking.shutdown(wait=False, cancel_futures=True)

    def tell(self, say: Callable[..., None]) -> None:
        """Who comes and goes is said from now on."""
        self._say = say

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def reachable(self) -> bool:
        return self._client.status == "running"

    @property
    def device(self) -> str:
        return self._device or "cpu"

    @property
    def gpu(self) -> str | None:
        """The kind of GPU that all have. Raises UnavailableError where there are several kinds."""
        kinds = {host.gpu for host in self._hosts.values() if host.gpu}
        if self.device == "cpu" or not kinds:
            return None
        if len(kinds) > 1:
            raise UnavailableError(
                f"--cluster: its workers have several kinds of GPU ({', '.join(sorted(kinds))}), "
                "whose scores could differ; use workers with one kind"
            )
        return kinds.pop()

    def require(self, seconds: float) -> None:
        """Wait for a first worker that fits. Raises UnavailableError where none comes."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self._hosts:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    break
        if self._hosts:
            return
        if self._unfit:
            address, why = next(iter(self._unfit.items()))
            raise UnavailableError(f"--cluster: no worker fits: {address}: {why}")
        raise UnavailableError(
            f"--cluster: no worker in {seconds:.0f} s; start some, such as `dask worker ADDRESS "
            "--nthreads 1`"
        )

    def summary(self) -> str:
        hosts = {host.name for host in self._hosts.values()}
        on = f"{len(hosts)} host{'s'[: len(hosts) > 1]}"
        kind = f", {self.gpu}" if self.gpu else ""
        return f"{len(self._hosts)} worker{'s'[: len(self._hosts) > 1]} on {on}{kind}"

    def host(self, worker: str) -> Host:
        """Raises OSError where it is gone."""
        found = self._hosts.get(worker)
        if found is None:
            raise OSError(f"{worker} is gone")
        return found

    def allowed(self, avoided: Set[str]) -> list[str] | None:
        """Addresses for a cell; None for all. Named only where some must not be used: a cell that
        may run on named workers alone waits for ever when they are gone."""
        if not avoided and not self._unfit:
            return None
        return [address for address in self._hosts if address not in avoided] or None

    def none_left(self, avoided: Set[str]) -> bool:
        """Whether nobody has been there for too long who could run a cell."""
        if self._hosts.keys() - avoided:
            return False
        return time.monotonic() - self._seen > self._patience or bool(self._hosts)

    def resources(self, cell: Cell) -> dict[str, float] | None:
        """What a cell needs, of what workers declare: one GPU's share, and memory in bytes."""
        declared = {name for one in self._resources.values() for name in one}
        needed: dict[str, float] = {}
        if self.device == "cuda" and GPU in declared:
            needed[GPU] = 1
        if MEMORY in declared:
            weights = sum(size for _, size, _ in cell.checkpoint.files)
            most = max(one.get(MEMORY, 0.0) for one in self._resources.values())
            needed[MEMORY] = min(3.0 * weights, most)  # it, its copy for the audit, room
        return needed or None

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A worker's worth of work. Raises BrokenExecutor where the cluster is lost."""
        with self._line.turn():
            yield

    def end(self) -> None:
        """The run is over: nobody waits for a worker any more."""
        self._ended.set()
        self._line.wake()

    def _require(self) -> None:
        if not self._hosts and time.monotonic() - self._seen > self._patience:
            raise BrokenExecutor("no worker has been there for too long")
        if self._ended.is_set() or not self.reachable:
            raise BrokenExecutor("the cluster was lost")

    def there(self, worker: str) -> bool:
        return worker in self._hosts

    def post(
        self, messages: Sequence[tuple[str, Callable, tuple]], *, seconds: float = 0.0
    ) -> None:
        """Have functions called on workers; what they return, and whether they are, is let be.
        Waits at most ``seconds`` for them."""
        asked = []
        for worker, function, arguments in messages if self.reachable else ():
            if worker in self._hosts:
                with suppress(RuntimeError):  # the run is over
                    asked.append(
                        self._asking.submit(
                            self._client.run, function, *arguments, workers=[worker]
                        )
                    )
        if seconds:
            wait(asked, seconds)

    def ask(self, worker: str, function: Callable, *arguments: Any) -> Any:
        """What ``function`` returns on ``worker``. Raises OSError where it is gone or silent."""
        found = self._answers(function, arguments, [worker], SECONDS_FOR_A_PART)
        if worker not in found:
            raise OSError(f"{worker} does not answer")
        return found[worker]

    def ask_all(self, function: Callable, *arguments: Any) -> dict[str, Any]:
        """One answer a cache: workers that see the same one would say the same. Who does not
        answer soon is left out."""
        chosen = {host.cache: worker for worker, host in list(self._hosts.items())}
        return self._answers(function, arguments, list(chosen.values()), SECONDS_FOR_AN_ANSWER)

    def with_folder(self, target: str) -> str | None:
        """A worker whose cache has the whole folder ``target``."""
        from qbench.cluster.transfer import is_whole

        return next((w for w, has in self.ask_all(is_whole, target).items() if has), None)

    def _answers(
        self, function: Callable, arguments: tuple, workers: list[str], seconds: float
    ) -> dict[str, Any]:
        """By worker. Each is asked by itself, since one that died or froze is waited for long."""
        asked = [
            self._asking.submit(self._client.run, function, *arguments, workers=[worker])
            for worker in workers
        ]
        end, found = time.monotonic() + seconds, {}
        for answer in asked:
            with suppress(OSError, RuntimeError, ValueError, CancelledError, TimeoutError):
                found |= answer.result(timeout=max(0.0, end - time.monotonic()))
        return found

    def look(self) -> None:
        """Who is there now."""
        try:
            seen = self._client.scheduler_info(n_workers=-1)["workers"]
        except (OSError, CancelledError, RuntimeError, KeyError):  # it was lost
            return
        new = [address for address in seen if address not in self._hosts | self._unfit]
        answers = self._answers(describe, (self._device,), new, SECONDS_FOR_AN_ANSWER)
        with self._changed:
            for address in [a for a in (*self._hosts, *self._unfit) if a not in seen]:
                if self._hosts.pop(address, None) is not None:
                    self._tell(f"worker {address} is gone", "bold red")
                self._unfit.pop(address, None)
            for address, host in answers.items():
                self._resources[address] = dict(seen[address].get("resources") or {})
                self._take(address, host)
            if self._hosts:
                self._seen = time.monotonic()
            self._changed.notify_all()
        self._line.serve()

    def _take(self, address: str, host: Host) -> None:
        gpus = {known.gpu for known in self._hosts.values() if known.gpu}
        problem = problem_of(host, here(), device=self._device, gpus=gpus)
        if problem:
            self._unfit[address] = problem
            self._tell(f"worker {address} is not used: {problem}", "bold red")
        else:
            self._hosts[address] = host
            self._tell(f"worker {address} on {host.name} is there")

    def _drop_unfit(self) -> None:
        for address, host in list(self._hosts.items()):
            del self._hosts[address]
            self._take(address, host)

    def _tell(self, line: str, style: str = "") -> None:
        if self._say is not None:
            self._say(line, style)

    def _watch(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_LOOKS):
            self.look()


def problem_of(host: Host, mine: Host, *, device: str | None, gpus: Set[str]) -> str | None:
    """Why a worker cannot be used: its scores would not stand under this run's keys.

    ``mine`` is the host of the plan; ``gpus`` are the kinds that other workers have.
    """
    if host.threads != 1:
        return f"it has {host.threads} threads; start it with --nthreads 1"
    if host.code != mine.code:
        return "its qbench has other code than this one"
    for name, version in mine.versions.items():
        if host.versions.get(name) != version:
            return f"it has {name} {host.versions.get(name)}, this host {version}"
    if device == "cuda":
        if host.gpu is None:
            return "it has no GPU"
        if gpus and host.gpu not in gpus:
            return f"it has another kind of GPU: {host.gpu}"
    return None
