"""``qbench run``: the cells of a recipe scored, their records and tables written."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from qbench.cache import cache_folder
from qbench.cli.messages import complain
from qbench.cli.options import (
    Against,
    ClusterOption,
    Device,
    DeviceOption,
    ExecutorOption,
    Only,
    Out,
    RecipeOrOptions,
    to_file,
)
from qbench.cli.place import Place, here, placed
from qbench.cli.plan import how, notes
from qbench.cli.recipe_options import recipe_options
from qbench.comparison.lines import read_noise
from qbench.comparison.wording import headline
from qbench.errors import RecipeError, some
from qbench.files import require_folder
from qbench.plan import Plan, cell_names, select
from qbench.recipe import Overrides, save
from qbench.records import Record
from qbench.runner.estimates import TimeLeft, earlier, expected
from qbench.runner.grid import run_cells
from qbench.store import Store


@recipe_options()
def run(
    *,
    recipe: RecipeOrOptions = None,
    overrides: Overrides,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
    force: Annotated[
        bool, typer.Option("--force", help="Run cells again that have a finished record.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(metavar="all|N", help="GPUs of this host to use. Default: one.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells side by side on each GPU, one process each: one is quantized while others "
            "are scored. Default: 3 on a GPU, 1 on a CPU.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    executor: ExecutorOption = None,
    against: Against = None,
    save_recipe: Annotated[
        Path | None, to_file("Write this run as a recipe, with absolute paths.")
    ] = None,
) -> None:
    """Quantize, audit and score every cell of a recipe, or of options alone; write records and
    delta tables.

    Finished cells are reused, so a run that was stopped goes on where it stopped. Exit code 1
    where a cell failed (it is tried again next time), 2 for input that cannot work.

    Examples:
    ```
    qbench run recipes/demo.yaml
    qbench run recipes/gptq.yaml --only "softpick/*" --gpus all
    qbench run --checkpoint mine=DIR --quantizers bf16,hqq-4bit --tasks piqa,arc_easy
    ```
    """
    place = here(recipe, overrides, out=out, device=device, cluster=cluster)
    names, checkpoints = cell_names(place.recipe), list(place.recipe.checkpoints)
    if against is not None and (len(checkpoints) > 1 or f"{checkpoints[0]}/{against}" not in names):
        raise RecipeError(
            f"--against {against}: names a precision of a run with one checkpoint; there are "
            f"{', '.join(names)}"
        )
    cells = len(select(names, only))
    require_folder(place.out, "--out")
    require_folder(cache_folder(), "$QBENCH_CACHE")
    read_noise(Store(place.out))  # the tables at the end read it: refused before work begins
    if save_recipe is not None:
        save(recipe, overrides, save_recipe)
    with placed(
        place, cluster, gpus=gpus, workers=workers, own=executor, cells=cells
    ) as place:  # whose processes import what they need while the run is planned
        planned, records = _run_cells(place, only, force)
    from qbench.cli.tables import show_tables  # pandas

    comparison = show_tables(Store(place.out, grid=planned.grid), against=against)
    typer.echo(f"{headline(comparison)} All of it: qbench view {place.out}", err=True)
    broken = [record for record in records if record.status == "failed" or record.failed_tasks]
    if broken:
        cells_failed = some([record.cell for record in broken])
        what = "failed" if any(record.status == "failed" for record in broken) else "lack a task"
        complain(f"{len(broken)} of {len(records)} cells {what}, as said above: {cells_failed}")
        raise typer.Exit(1)


def _run_cells(place: Place, only: str | None, force: bool) -> tuple[Plan, list[Record]]:
    """The plan, and the records of the cells like ``only``, with progress on the terminal."""
    planned, out = place.plan(only), place.out
    cells = planned.select(only)
    known = earlier(out)
    seconds = {cell.name: one.seconds for cell in cells if (one := expected(cell, planned, known))}
    left = TimeLeft([cell.name for cell in cells], expected=seconds, at_once=place.at_once)
    with place.display(len(cells), left) as display:
        display.log(f"{len(cells)} of {len(planned.cells)} cells on {how(planned, cells)}")
        for line in notes(planned, cells):  # nothing is chosen in silence
            display.log(line)
        if planned.calibration is not None:
            display.log(f"calibration text: {planned.calibration.path}")
        begun = datetime.now(UTC)
        records = run_cells(
            planned, out=out, cells=cells, executor=place.executor, progress=display, force=force
        )
        made = sum(record.started >= begun for record in records)
        took = (datetime.now(UTC) - begun).total_seconds()
        display.log(f"{made} of {len(records)} cells were run, in {took:.0f} s")
    return planned, records
