"""The options of commands that plan and run, read and checked, and where their cells run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qbench.errors import RecipeError
from qbench.recipe import Overrides

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from qbench.plan import Plan
    from qbench.recipe import Recipe

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
        from qbench.runner.workers import Workers

        if isinstance(self.executor, Workers):
            self.executor.terminate()


def make_job(recipe: Path | None, overrides: Overrides, *, out: Path | None, device: str) -> Job:
    """The options of a command that plans, with the recipe read and checked."""
    from qbench.machine import choose_device
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
) -> Iterator[Place]:
    """Where the cells of ``job`` run: here, in processes of this host, on an executor of a plug-in
    (``own``), or on a cluster, whose workers say what device it is. Raises QbenchError for what is
    not there, or for several of them."""
    from qbench.machine import gpu_slots
    from qbench.runner.workers import EXECUTORS, Workers

    if own is not None:
        stated = {"--cluster": cluster, "--gpus": gpus, "--workers": workers}
        if also := [option for option, value in stated.items() if value is not None]:
            raise RecipeError(f"--executor {own}: leave {also[0]} out, one or the other runs cells")
        with EXECUTORS.get(own)(job.device) as executor:
            yield Place(job=job, executor=executor, description=f"executor {own}")
        return
    if cluster is not None:
        with on_cluster(job, device, cluster, gpus=gpus, workers=workers, cells=cells) as place:
            yield place
        return
    slots = gpu_slots(gpus, workers, job.device, CELLS_A_GPU, at_most=cells)
    if not slots:
        yield Place(job=job, executor=None)
        return
    executor = Workers(slots, device=job.device)
    try:
        yield Place(job=job, executor=executor, at_once=len(slots))
    finally:
        executor.shutdown(cancel_futures=True)


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
    from qbench.cell import cache_folder
    from qbench.machine import choose_device
    from qbench.runner.dask import connected, require_dask

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
    folders = (job.out, cache_folder())
    with connected(cluster, wanted, slots=slots, folders=folders) as found:
        there = dataclasses.replace(job, device=found.device, gpu=found.gpu)
        yield Place(
            job=there, executor=found.executor, description=found.description,
            at_once=found.workers,
        )  # fmt: skip


def local_slots(
    cluster: str, gpus: str | None, workers: int | None, device: str, cells: int
) -> list[int]:
    """The GPU of each worker of ``local`` or ``local:N``, spread over all GPUs of this host unless
    ``gpus`` says how many; on the CPU as many numbers as workers, none for the usual one."""
    from qbench.machine import gpu_slots
    from qbench.runner.dask import local_workers

    count = local_workers(cluster)
    if count is not None and workers is not None:
        raise RecipeError(f"--cluster {cluster}: says how many workers; leave --workers out")
    over = "all" if device == "cuda" and gpus is None else gpus
    return gpu_slots(over, workers or count, device, CELLS_A_GPU, at_most=count or cells)


def start_workers(
    device: str, cluster: str | None, *, workers: int | None, own: str | None
) -> None:
    """Have the fork server import what cells need from now on, while the recipe is read, where they
    may run in processes of this host. Raises QbenchError for a device that is not there."""
    from qbench.machine import choose_device, cuda_is_likely
    from qbench.runner.workers import start_forkserver

    if cluster is not None or own is not None:
        return
    if device != "cpu" and cuda_is_likely():
        start_forkserver(workers or CELLS_A_GPU)
        choose_device(device)
    elif (workers or 1) > 1:
        start_forkserver(workers or 1)


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
