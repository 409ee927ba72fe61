"""``qbench noise``: how far scores move when batches alone change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from qbench.cli.job import Place, make_job, named, on_cluster
from qbench.cli.options import (
    CheckpointsOfRecipe,
    ClusterOption,
    Data,
    Device,
    DeviceOption,
    DtypeOption,
    Limit,
    Out,
    PluginOption,
    RecipeFile,
    ScoringOption,
)
from qbench.cli.screen import show_written
from qbench.errors import EvaluationError, RecipeError
from qbench.files import require_folder
from qbench.machine import terminal
from qbench.recipe import Overrides

if TYPE_CHECKING:
    from qbench.evaluation.noise import Noise
    from qbench.plan import Cell, Plan


def noise(
    recipe: RecipeFile,
    checkpoint: CheckpointsOfRecipe = [],  # noqa: B006
    data: Data = None,
    limit: Limit = None,
    dtype: DtypeOption = None,
    scoring: ScoringOption = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
    plugin: PluginOption = [],  # noqa: B006
    cluster: ClusterOption = None,
) -> None:
    """Score the unquantized checkpoints under other batch orders and sizes: the noise floor.

    A difference below it says nothing, and the tables of the same results folder mark it so.
    Written there as noise.json.
    """
    from qbench.comparison.lines import FILE, to_bytes
    from qbench.plan import cell_names
    from qbench.store import write_atomically
    from qbench.tables.changes import noise_table

    overrides = Overrides(
        checkpoints=named(checkpoint), data=data, limit=limit, dtype=dtype, scoring=scoring
    )
    job = make_job(recipe, overrides, out=out, device="cpu" if cluster else device)
    require_folder(job.out)
    with contextlib.ExitStack() as stack:
        place = Place(job=job, executor=None)
        if cluster is not None:
            most = len(cell_names(job.recipe))
            place = stack.enter_context(on_cluster(job, device, cluster, cells=most))
        planned = place.job.plan(show=True)  # of which only unquantized cells are scored
        chosen = [cell for cell in planned.cells if not cell.quantization.precision.quantized]
        if not chosen:
            raise RecipeError(f"{recipe}: quantizers: noise needs an unquantized one, bf16 or fp32")
        found = {}
        for name, one in _noises(planned, chosen, place):
            found[name] = one
            typer.echo(f"### {name}\n\n{noise_table(one.moved)}\n")
    keys = {cell.name: cell.key for cell in planned.cells}
    cells = {name: {"key": keys[name], **one.to_json()} for name, one in found.items()}
    path = job.out / FILE
    write_atomically(path, to_bytes(cells))
    show_written([path])


def _noises(plan: Plan, cells: Sequence[Cell], place: Place) -> Iterator[tuple[str, Noise]]:
    """By cell, here or on the cluster. Raises EvaluationError for one that failed there."""
    from qbench.runner.grid import run_each
    from qbench.runner.noise import measure
    from qbench.runner.progress import Display

    out = place.job.out.resolve()
    with terminal() as screen, Display(screen, len(cells)) as display:
        if place.description:
            display.log(place.description)
        if place.executor is None:
            for cell in cells:
                yield cell.name, measure(plan, out, cell, progress=display)
            return
        made = run_each(
            partial(measure, plan, out), cells,
            executor=place.executor, progress=display, died=_died,
        )  # fmt: skip
    yield from zip((cell.name for cell in cells), made, strict=True)


def _died(cell: Cell, why: str) -> Noise:
    raise EvaluationError(f"{cell.name}: {why}")
