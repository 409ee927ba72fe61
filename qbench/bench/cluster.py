"""A cluster of real processes on this host, each with a cache of its own, and faults in it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qbench.bench import cluster_stub as stub
from qbench.cluster.connect import connected
from qbench.plan import Plan, plan
from qbench.progress import SilentProgress
from qbench.recipe import Recipe
from qbench.records import Record
from qbench.running.grid import run_cells
from qbench.store import Store

TTL = "4s"  # without a sign of life, until a worker is given up
LOOKS_AT_LOCKS = "2s"  # between two, whether who held them is there
SECONDS_TO_START = 60.0
PACKAGE = Path(__file__).parents[2]


@dataclass
class Bed:
    """A scheduler and workers. ``folder`` holds what they write, logs too."""

    folder: Path
    host: str = "127.0.0.1"
    allowed_failures: int = 2
    scheduler: subprocess.Popen | None = None
    port: int = 0
    workers: list[subprocess.Popen] = field(default_factory=list)
    begun: Path = Path()  # the stub's marks

    def __post_init__(self) -> None:
        if self.begun == Path():
            self.begun = self.folder / "begun"

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def start(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """``workers``: the settings of ``add_worker`` of each."""
        self.begun.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.scheduler = self._process(
            ["scheduler", "--host", "0.0.0.0", "--port", str(self.port), "--no-dashboard"],
            "scheduler",
        )
        for settings in workers:
            self.add_worker(**settings)

    def add_worker(
        self,
        *,
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
        memory_limit: str = "0",
        disk_mib: int | None = None,
        stubbed: bool = True,
        blind_to: Path | None = None,
    ) -> subprocess.Popen:
        """One more; ``before`` stands before its command, such as ``ip netns exec NAME``.

        ``memory_limit``: of what runs cells, kept by its nanny. ``disk_mib``: room in its cache.
        ``stubbed``: its cells need no model. ``blind_to``: a folder that it does not see, as on
        another host.
        """
        number = len(self.workers)
        cache = self.folder / f"cache-{number}"
        cache.mkdir(parents=True, exist_ok=True)
        process = self._process(
            ["worker", self.address, "--nthreads", "1", "--no-dashboard",
             "--memory-limit", memory_limit,
             "--local-directory", str(self.folder / f"local-{number}"),
             *(["--preload", "qbench.bench.cluster_stub"] if stubbed else [])],
            f"worker-{number}",
            environment={"QBENCH_CACHE": str(cache), **(environment or {})},
            before=[
                *before,
                *(_mounted(blind_to) if blind_to else ()),
                *(_mounted(cache, disk_mib) if disk_mib else ()),
            ],
        )  # fmt: skip
        self.workers.append(process)
        return process

    def processes(self, worker: subprocess.Popen) -> list[int]:
        """The process that runs cells, and whatever else stands below a nanny."""
        found, waiting = [], [worker.pid]
        while waiting:
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*"):
                with suppress(OSError):
                    children = [int(c) for c in (task / "children").read_text().split()]
                    found += children
                    waiting += children
        return found

    def kill(self, worker: subprocess.Popen, by: int = signal.SIGKILL) -> None:
        """What runs cells; the nanny goes on and starts it anew."""
        for process in self.processes(worker):
            with suppress(ProcessLookupError):
                os.kill(process, by)

    def wait_until_begun(self, cells: int, seconds: float = SECONDS_TO_START) -> None:
        end = time.monotonic() + seconds
        while len(list(self.begun.iterdir())) < cells:
            if time.monotonic() > end:
                raise TimeoutError(f"{cells} cells did not begin; see {self.folder}")
            time.sleep(0.05)

    def wait_for_workers(self, number: int) -> None:
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:
            client.wait_for_workers(number, timeout=SECONDS_TO_START)

    def stop(self) -> None:
        for process in (*self.workers, self.scheduler):
            if process is None:
                continue
            for child in self.processes(process):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.kill()
            process.wait()

    def _process(
        self,
        command: Sequence[str],
        name: str,
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen:
        paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {
            stub.BEGUN: str(self.begun),
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(self.allowed_failures),
            "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": TTL,
            "DASK_DISTRIBUTED__SCHEDULER__LOCKS__LEASE_VALIDATION_INTERVAL": LOOKS_AT_LOCKS,
            "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*before, sys.executable, "-m", "dask", *command],
                env={**os.environ, **settings, **(environment or {})},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip


@contextmanager
def bed(
    folder: Path,
    workers: Sequence[Mapping[str, Any]],
    *,
    host: str = "127.0.0.1",
    allowed_failures: int = 2,
) -> Iterator[Bed]:
    """A bed that is gone afterwards."""
    made = Bed(folder=folder, host=host, allowed_failures=allowed_failures)
    try:
        made.start(workers)
        yield made
    finally:
        made.stop()


def stub_recipe(folder: Path, cells: int, tasks: int = 1) -> Path:
    """Of ``cells`` cells of the bundled pair: nothing of a cell but its name matters here."""
    demo = PACKAGE / "recipes" / "demo"
    names = [f"stub_{number}" for number in range(tasks)]
    definition = (demo / "tasks" / "demo_choice.yaml").read_text()
    for name in names:
        (folder / "tasks").mkdir(exist_ok=True)
        text = definition.replace("task: demo_choice", f"task: {name}")
        (folder / "tasks" / f"{name}.yaml").write_text(text)
        shutil.copytree(demo / "data" / "demo_choice", folder / "data" / name, dirs_exist_ok=True)
    content = {
        "name": "stub",
        "checkpoints": {"softmax": str(demo / "softmax"), "softpick": str(demo / "softpick")},
        "compute_dtype": "float32",
        "quantizers": [
            {"name": "rtn-4bit", "group_size": 64, "threads": number + 1, "label": f"rtn-{number}"}
            for number in range(cells // 2)
        ],
        "tasks": names,
        "definitions": "tasks",
        "data": "data",
        "evaluation": {"limit": 1, "damage": False},
    }
    path = folder / "stub.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def stub_plan(folder: Path, cells: int, tasks: int = 1) -> Plan:
    return plan(Recipe.load(stub_recipe(folder, cells, tasks)), device="cpu")


def run_on(bed: Bed, planned: Plan, out: Path, progress: object | None = None) -> list[Record]:
    with connected(bed.address, "cpu") as cluster:
        return run_cells(
            planned, out=out, executor=cluster.executor, progress=progress or SilentProgress()
        )


def judged(planned: Plan, out: Path) -> dict[str, str]:
    """By cell: ``ok``, ``failed: why``, ``missing``; a good record is read with its tables."""
    store, found = Store(out), {}
    for cell in planned.cells:
        record = store.whole(cell.grid_cell)
        if record is None:
            found[cell.name] = "missing"
        else:
            found[cell.name] = "ok" if record.status == "ok" else f"failed: {record.error}"
    return found


def records_on_disk(out: Path) -> int:
    return len([p for p in (out / "records").rglob("*.json") if json.loads(p.read_bytes())])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def _mounted(folder: Path, mib: int | None = None) -> list[str]:
    """A command in a mount namespace of its own, where ``folder`` is empty."""
    size = f"-o size={mib}m " if mib else ""
    script = f'mount -t tmpfs {size}none {shlex.quote(str(folder))} && exec "$@"'
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
