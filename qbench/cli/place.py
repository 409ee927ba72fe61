"""Where the cells of a recipe run: in this process, in processes of this host, on an executor of a
plug-in, or on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.cache import cache_folder
from qbench.errors import RecipeError, UnavailableError
from qbench.machine import choose_device, gpu_slots, terminal
from qbench.plan import Plan, cell_names, plan
from qbench.recipe import Overrides, Recipe
from qbench.runner.estimates import TimeLeft
from qbench.runner.progress import Display
from qbench.runner.workers import EXECUTORS, Workers

if TYPE_CHECKING:
    from qbench.runner.dask import DaskExecutor

CELLS_A_GPU = 3  # quantization of one cell overlaps with the scoring of others


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A recipe, the folder of its results, and what its cells run on. ``executor`` None: one after
    the other in this process; ``description``: a line about it."""

    recipe: Recipe
    out: Path
    device: str
    gpu: str | None = None  # of other hosts; None: this one's
    executor: Executor | None = None
    description: str = ""
    at_once: int = 1  # cells side by side

    def plan(self, only: str | None = None, *, show: bool = False) -> Plan:
        """Raises RecipeError where a cell like ``only`` can never run, unless it is to ``show``
        that."""
        return plan(self.recipe, device=self.device, gpu=self.gpu, only=only, show=show)

    @contextlib.contextmanager
    def display(self, cells: int, estimate: TimeLeft | None = None) -> Iterator[Display]:
        """Progress on the terminal, the line about the place first."""
        with terminal() as screen, Display(screen, cells, estimate) as display:
            if self.description:
                display.log(self.description)
            yield display


def here(
    recipe: Path | None,
    overrides: Overrides,
    *,
    out: Path | None,
    device: str,
    cluster: str | None = None,
) -> Place:
    """This process, with the recipe read and checked. With a ``cluster`` the device is the one that
    is asked for, ``auto`` too: ``placed`` asks the workers."""
    loaded = Recipe.load(recipe, overrides)
    return Place(
        recipe=loaded,
        out=out or Path("results") / loaded.name,
        device=device if cluster else choose_device(device),
    )


@contextlib.contextmanager
def placed(
    place: Place,
    cluster: str | None,
    *,
    gpus: str | None = None,
    workers: int | None = None,
    own: str | None = None,
    cells: int | None = None,
) -> Iterator[Place]:
    """A cluster, or the executor ``own`` of a plug-in, or processes of this host for so many
    ``cells``, which import what these need from now on; ``place`` itself where cells run one after
    the other. Raises QbenchError for what is not there, or for several of them."""
    stated = {"--cluster": cluster, "--gpus": gpus, "--workers": workers}
    also = next((option for option, value in stated.items() if value is not None), None)
    alone = "evaluation.device_map" if place.recipe.evaluation.device_map else None
    alone = alone if own is None else f"--executor {own}"
    if alone is not None and also is not None:
        raise RecipeError(f"{alone}: leave {also} out; only one of the two can say where cells run")
    if own is not None:
        with EXECUTORS.get(own)(place.device) as executor:
            yield dataclasses.replace(place, executor=executor, description=f"executor {own}")
    elif cluster is not None:
        with _connected(place, cluster, gpus, workers, cells) as found:
            yield dataclasses.replace(
                place, device=found.device, gpu=found.wanted.gpu, executor=found,
                description=found.description, at_once=found.workers,
            )  # fmt: skip
    elif (
        cells is not None
        and alone is None  # one process has all GPUs
        and (slots := gpu_slots(gpus, workers, place.device, CELLS_A_GPU, at_most=cells))
    ):
        processes = Workers(slots, device=place.device)
        processes.preload()
        try:
            yield dataclasses.replace(place, executor=processes, at_once=len(slots))
        finally:
            processes.shutdown(cancel_futures=True)
    else:
        yield place


def _connected(
    place: Place, cluster: str, gpus: str | None, workers: int | None, cells: int | None
) -> contextlib.AbstractContextManager[DaskExecutor]:
    """The workers of ``--cluster``, on the device that is asked for or the one that they have."""
    if importlib.util.find_spec("distributed") is None:
        raise UnavailableError("--cluster: Dask is not installed; pip install 'qbench[cluster]'")
    from qbench.runner.dask import connected  # an extra, and a second to import

    wanted, slots = None if place.device == "auto" else place.device, []
    if cluster.partition(":")[0] == "local":
        wanted = choose_device(place.device)
        cells = cells or len(cell_names(place.recipe))
        slots = local_slots(cluster, gpus, workers, wanted, cells)
    elif gpus is not None or workers is not None:
        raise RecipeError(
            f"--cluster {cluster}: its workers are running already; leave --gpus and --workers out"
        )
    return connected(cluster, wanted, slots=slots, folders=(place.out, cache_folder()))


def local_slots(
    cluster: str, gpus: str | None, workers: int | None, device: str, cells: int
) -> list[int]:
    """The GPU of each worker of ``local`` or ``local:N``, spread over all GPUs of this host unless
    ``gpus`` says how many; on the CPU as many numbers as workers, none for the usual one."""
    _, colon, number = cluster.partition(":")
    if colon and not (number.isdecimal() and 1 <= int(number) <= 1024):
        raise RecipeError(f"--cluster {cluster}: write local:N with N workers, from 1 to 1024")
    if colon and workers is not None:
        raise RecipeError(f"--cluster {cluster}: says how many workers; leave --workers out")
    count = int(number) if colon else None
    over = "all" if device == "cuda" and gpus is None else gpus
    return gpu_slots(over, workers or count, device, CELLS_A_GPU, at_most=count or cells)
