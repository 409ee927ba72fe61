"""Decide where the cells of a recipe run: in this process, in processes of this host, on an
executor of a plug-in, or on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qbench.errors import RecipeError, UnavailableError
from qbench.files import cache_folder
from qbench.machine import choose_device, gpu_slots, terminal
from qbench.plan import Plan, cell_names, plan
from qbench.recipe import Overrides, Recipe, added_column
from qbench.runner.grid import portable
from qbench.runner.progress import Display
from qbench.runner.workers import EXECUTORS, Workers

if TYPE_CHECKING:
    from qbench.runner.dask import DaskExecutor

CELLS_PER_GPU = 3  # quantization of one cell overlaps with the scoring of others


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """Holds a recipe, its results folder and what its cells run on: an ``executor``, or None for
    this process, one cell after the other. ``description`` is a line about the executor."""

    recipe: Recipe
    out: Path
    device: str
    gpu: str | None = None  # name of the GPUs of other hosts; None: those of this host
    executor: Executor | None = None
    description: str = ""

    def plan(self, only: str | None = None, *, show: bool = False) -> Plan:
        """Plan the recipe on this device.

        Raises RecipeError if a cell that matches ``only`` can never run, unless ``show`` is true.
        """
        begin = None  # a process of its own, which ends
        if isinstance(self.executor, Workers):
            begin = self._begin
        elif self.executor is None and not show:  # cells follow in this process
            begin = functools.partial
        return plan(
            self.recipe, device=self.device, gpu=self.gpu, only=only, show=show, begin=begin
        )

    def _begin(self, function: Callable[..., Any], argument: object) -> Callable[[], Any]:
        assert self.executor is not None
        return self.executor.submit(portable(functools.partial(function, argument))).result

    @contextlib.contextmanager
    def display(self, cells: int) -> Iterator[Display]:
        """Show the progress of so many ``cells`` on the terminal, the description first."""
        with terminal() as screen, Display(screen, cells) as display:
            if self.description:
                display.log(self.description)
            yield display


def load_launcher(
    recipe: Path | None,
    overrides: Overrides,
    *,
    out: Path | None,
    device: str,
    cluster: str | None = None,
) -> Launcher:
    """Read and check a recipe; return a launcher that runs its cells in this process.

    With a ``cluster`` the device stays as given, ``auto`` too: ``launch`` asks the workers.
    """
    loaded = Recipe.load(recipe, overrides)
    if recipe is None and (line := added_column(loaded, overrides)):
        typer.echo(line, err=True)
    return Launcher(
        recipe=loaded,
        out=out or Path("results") / loaded.name,
        device=device if cluster else choose_device(device),
    )


@contextlib.contextmanager
def launch(
    launcher: Launcher,
    cluster: str | None,
    *,
    gpus: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    cells: int | None = None,
) -> Iterator[Launcher]:
    """Start what runs the cells; yield a launcher with its executor.

    ``cluster``, ``gpus``, ``workers`` and ``executor`` (a plug-in's name) are the options of
    ``qbench run``. ``cells`` is their number; None starts no processes of this host. Without an
    executor ``launcher`` itself is yielded. Raises QbenchError for what is not there, and for
    options that exclude each other.
    """
    options = {"--cluster": cluster, "--gpus": gpus, "--workers": workers}
    option = next((option for option, value in options.items() if value is not None), None)
    single_process = "evaluation.device_map" if launcher.recipe.evaluation.device_map else None
    exclusive = single_process if executor is None else f"--executor {executor}"
    if exclusive is not None and option is not None:
        raise RecipeError(
            f"{exclusive}: leave {option} out; only one of the two can say where cells run"
        )
    if executor is not None:
        with EXECUTORS.get(executor)(launcher.device) as running:
            yield dataclasses.replace(
                launcher, executor=running, description=f"executor {executor}"
            )
    elif cluster is not None:
        with _connected(launcher, cluster, gpus, workers, cells) as dask:
            yield dataclasses.replace(
                launcher, device=dask.device, gpu=dask.expected.gpu, executor=dask,
                description=dask.description,
            )  # fmt: skip
    elif (
        cells is not None
        and single_process is None
        and (slots := gpu_slots(gpus, workers, launcher.device, CELLS_PER_GPU, at_most=cells))
    ):
        processes = Workers(slots, device=launcher.device)
        processes.preload()
        try:
            yield dataclasses.replace(launcher, executor=processes)
        finally:
            processes.shutdown(cancel_futures=True)
    else:
        yield launcher


def _connected(
    launcher: Launcher, cluster: str, gpus: str | None, workers: int | None, cells: int | None
) -> contextlib.AbstractContextManager[DaskExecutor]:
    """Return the context of the workers of ``--cluster``, on the device that ``launcher`` names or,
    for ``auto``, on the one that they have."""
    if importlib.util.find_spec("distributed") is None:
        raise UnavailableError("--cluster: Dask is not installed; pip install -e '.[cluster]'")
    from qbench.runner.dask import connected  # an extra, and a second to import

    chosen, slots = None if launcher.device == "auto" else launcher.device, []
    if cluster.partition(":")[0] == "local":
        chosen = choose_device(launcher.device)
        cells = cells or len(cell_names(launcher.recipe))
        slots = local_slots(cluster, gpus, workers, chosen, cells)
    elif gpus is not None or workers is not None:
        raise RecipeError(
            f"--cluster {cluster}: its workers are running already; leave --gpus and --workers out"
        )
    return connected(cluster, chosen, slots=slots, folders=(launcher.out, cache_folder()))


def local_slots(
    cluster: str, gpus: str | None, workers: int | None, device: str, cells: int
) -> list[int]:
    """Return the GPU of each worker of ``local`` or ``local:N``, spread over all GPUs of this host
    unless ``gpus`` says how many; on the CPU a zero per worker, an empty list for one worker."""
    _, colon, number = cluster.partition(":")
    if colon and not (number.isdecimal() and 1 <= int(number) <= 1024):
        raise RecipeError(f"--cluster {cluster}: write local:N with N workers, from 1 to 1024")
    if colon and workers is not None:
        raise RecipeError(f"--cluster {cluster}: says how many workers; leave --workers out")
    count = int(number) if colon else None
    over = "all" if device == "cuda" and gpus is None else gpus
    return gpu_slots(over, workers or count, device, CELLS_PER_GPU, at_most=count or cells)
