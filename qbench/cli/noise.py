"""``qbench noise``: what other batches alone change."""

from __future__ import annotations

from functools import partial

import typer

from qbench.cli.messages import show_written
from qbench.cli.options import ClusterOption, DeviceOption, Out, RecipeFile, recipe_options
from qbench.cli.place import here, placed
from qbench.comparison.lines import FILE
from qbench.errors import EvaluationError, RecipeError, some
from qbench.files import require_folder
from qbench.plan import Cell
from qbench.recipe import Overrides
from qbench.records import CellNoise, NoiseRecord
from qbench.runner.grid import measure_noise, run_each
from qbench.store import write
from qbench.tables.changes import noise_table


@recipe_options("checkpoint", "data", "limit", "dtype", "scoring")
def noise(
    *,
    recipe: RecipeFile,
    overrides: Overrides,
    out: Out = None,
    device: DeviceOption = "auto",
    cluster: ClusterOption = None,
) -> None:
    """Score the unquantized checkpoints under other batch orders and sizes: the noise floor.

    A difference below it says nothing, and the tables of the same results folder mark it so.
    Written there as noise.json.

    Examples:
    ```
    qbench noise recipes/gptq.yaml --limit 200
    ```
    """
    place = here(recipe, overrides, out=out, device=device, cluster=cluster)
    require_folder(place.out)
    with placed(place, cluster) as place:
        planned = place.plan(show=True)  # of which only unquantized cells are scored
        chosen = [cell for cell in planned.cells if not cell.quantization.precision.quantized]
        if not chosen:
            raise RecipeError(f"{recipe}: quantizers: noise needs an unquantized one, bf16 or fp32")
        if by_hflm := [cell.name for cell in chosen if cell.scoring.mode == "lm-eval"]:
            raise RecipeError(
                f"evaluation.scoring: lm-eval cannot change the order of batches, and it scores "
                f"{some(by_hflm)}; use exact or fast, or leave out models that it alone can score"
            )
        kept = {}
        with place.display(len(chosen)) as display:
            made = run_each(
                partial(measure_noise, plan=planned, out=place.out.resolve()), chosen,
                executor=place.executor, progress=display, died=_died,
            )  # fmt: skip
            for cell, one in zip(chosen, made, strict=True):
                kept[cell.name] = one
                typer.echo(noise_table(cell.name, one.moved))
    path = place.out / FILE
    write(path, NoiseRecord(cells=kept))
    show_written([path])


def _died(cell: Cell, why: str) -> CellNoise:
    raise EvaluationError(f"{cell.name}: {why}")
