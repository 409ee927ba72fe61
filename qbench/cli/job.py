"""The options of commands that plan and run, read and checked, and where their cells run."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qbench.errors import RecipeError
from qbench.machine.clock import mark
from qbench.machine.memory import require_memory
from qbench.recipe import Overrides

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from qbench.plan import Plan
    from qbench.recipe import Recipe
    from qbench.running.executors import Processes

CELLS_A_GPU = 3  # quantization of one cell overlaps with the scoring of others


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The options of a command that plans, read and checked."""

    recipe: Recipe
    out: Path
    device: str
    gpu: str | None = None  # of other hosts; None: this one's

    def plan(self, only: str | None = None, *, show: bool = False) -> Plan:
        """The plan, with what is downloaded for it said on standard error. Raises RecipeError
        where a cell like ``only`` can never run, unless it is to ``show`` that."""
        from qbench import hub
        from qbench.plan import plan

        with hub.announcing(lambda line: typer.echo(line, err=True)):
            return plan(self.recipe, device=self.device, gpu=self.gpu, only=only, show=show)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where cells run: an executor (None: one after the other in this process), the job with the
    device that is there, and a line about it."""

    job: Job
    executor: Executor | None
    description: str = ""
    at_once: int = 1  # cells side by side

    def end(self) -> None:
        """No cell comes any more: processes of this host end from now on, beside what follows."""
        from qbench.running.executors import Processes

        if isinstance(self.executor, Processes):
            self.executor.terminate()


def make_job(recipe: Path | None, overrides: Overrides, *, out: Path | None, device: str) -> Job:
    """The options of a command that plans, with the recipe read and checked."""
    require_memory()
    from qbench.machine.devices import choose_device
    from qbench.recipe import Recipe

    loaded = Recipe.load(recipe, overrides)
    return Job(
        recipe=loaded,
        out=out or Path("results") / loaded.name,
        device=choose_device(device),
    )


@contextlib.contextmanager
def placed(
    job: Job,
    device: str,
    cluster: str | None,
    *,
    gpus: str | None,
    workers: int | None,
    own: str | None,
    cells: int,
    first: Processes | None = None,
) -> Iterator[Place]:
    """Where the cells of ``job`` run: here, in processes of this host (``first`` has started the
    first of them), on an executor of a plug-in (``own``), or on a cluster, whose workers say what
    device it is. Raises QbenchError for what is not there, or for several of them."""
    from qbench.machine.devices import gpu_slots
    from qbench.running.executors import EXECUTORS

    if own is not None:
        stated = {"--cluster": cluster, "--gpus": gpus, "--workers": workers}
        if also := [option for option, value in stated.items() if value is not None]:
            raise RecipeError(f"--executor {own}: leave {also[0]} out, one or the other runs cells")
        with EXECUTORS.get(own)(job.device) as executor:
            yield Place(job=job, executor=executor, description=f"executor {own}")
        return
    if cluster is None:
        slots = gpu_slots(gpus, workers, job.device, CELLS_A_GPU, at_most=cells)
        if first is not None:
            first.start(slots[1:])
        with contextlib.nullcontext(first) if first else _processes(slots, job.device) as executor:
            yield Place(job=job, executor=executor, at_once=max(1, len(slots)))
        return
    with on_cluster(job, device, cluster, gpus=gpus, workers=workers, cells=cells) as place:
        yield place


@contextlib.contextmanager
def on_cluster(
    job: Job,
    device: str,
    cluster: str,
    *,
    gpus: str | None = None,
    workers: int | None = None,
    cells: int,
) -> Iterator[Place]:
    """The workers of ``--cluster``. Raises QbenchError where there are none."""
    from qbench.cluster.connect import connected, require_dask
    from qbench.machine.devices import choose_device

    require_dask()
    wanted, slots = None if device == "auto" else str(device), []
    if cluster.partition(":")[0] == "local":
        wanted = choose_device(device)
        slots = local_slots(cluster, gpus, workers, wanted, cells)
    elif gpus is not None or workers is not None:
        raise RecipeError(
            f"--cluster {cluster}: its workers are as they were started; leave --gpus and "
            "--workers out"
        )
    with connected(cluster, wanted, slots=slots) as found:
        there = dataclasses.replace(job, device=found.workers.device, gpu=found.workers.gpu)
        yield Place(
            job=there, executor=found.executor, description=found.description,
            at_once=len(found.workers),
        )  # fmt: skip


def local_slots(
    cluster: str, gpus: str | None, workers: int | None, device: str, cells: int
) -> list[int]:
    """The GPU of each worker of ``local`` or ``local:N``, spread over all GPUs of this host unless
    ``gpus`` says how many; on the CPU as many numbers as workers, none for the usual one."""
    from qbench.cluster.connect import local_workers
    from qbench.machine.devices import gpu_slots

    count = local_workers(cluster)
    if count is not None and workers is not None:
        raise RecipeError(f"--cluster {cluster}: says how many workers; leave --workers out")
    over = "all" if device == "cuda" and gpus is None else gpus
    return gpu_slots(over, workers or count, device, CELLS_A_GPU, at_most=count or cells)


@contextlib.contextmanager
def first_process(
    device: str, cluster: str | None, *, gpus: str | None, workers: int | None, own: str | None
) -> Iterator[Processes | None]:
    """An executor with one process on this host's GPU, which imports what it needs from now on,
    while the recipe is read; None where cells run on the CPU, on GPUs by number, or elsewhere.
    GPUs by number are counted first: the driver that does it starts from now on.
    Raises QbenchError for a device that is not there."""
    from qbench.machine.devices import choose_device, cuda_is_likely

    require_memory()
    here = cluster is None and own is None and device != "cpu" and cuda_is_likely()
    # The driver takes half a second to start, which the process need not wait for.
    slots = [0] if here and gpus is None else []
    if here and gpus is not None:
        threading.Thread(target=_start_driver, daemon=True).start()
    with _processes(slots, "cuda", at_most=workers or CELLS_A_GPU) as executor:
        if executor is None or choose_device(device) == "cuda":
            yield executor
            return
    yield None


def _start_driver() -> None:
    from qbench.machine.devices import cuda_problem

    with contextlib.suppress(Exception):  # said where the device is asked for
        cuda_problem()


@contextlib.contextmanager
def _processes(
    slots: Sequence[int], device: str, *, at_most: int | None = None
) -> Iterator[Processes | None]:
    """An executor over one process a slot, which import what they need from now on; None for no
    slots, where cells run in this process."""
    if not slots:
        yield None
        return
    from qbench.running.executors import Processes
    from qbench.running.warm_up import first

    mark("worker processes start")
    executor = Processes(slots, device=device, first=first(device), at_most=at_most, idle_ends=True)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def listed(option: str, names: str | None) -> tuple[str, ...] | None:
    """Names by commas; RecipeError for an empty one."""
    if names is None:
        return None
    found = tuple(name.strip() for name in names.split(","))
    if not all(found):
        raise RecipeError(f"{option} {names!r}: write names with commas between them")
    return found


def named(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=SOURCE`` pairs as a dictionary; RecipeError for a malformed or repeated one."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not (name and separator and source):
            raise RecipeError(f"--checkpoint {pair}: write NAME=PATH_OR_HUB_ID")
        if name in found:
            raise RecipeError(f"--checkpoint {pair}: {name} is given twice")
        found[name] = source
    return found
