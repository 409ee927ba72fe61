"""``qbench run`` and ``plan``: cells, and what they would be."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.job import Place, listed, make_job, named, placed, start_workers
from qbench.cli.options import (
    Calibration,
    Checkpoints,
    ClusterOption,
    Data,
    Definitions,
    Device,
    DeviceOption,
    DtypeOption,
    ExecutorOption,
    Limit,
    Only,
    Out,
    OutToRead,
    PluginOption,
    Quantizers,
    RecipeOrOptions,
    ScoringOption,
    SkipMissing,
    Tasks,
    to_file,
)
from qbench.cli.screen import complain
from qbench.files import require_folder
from qbench.machine import terminal
from qbench.recipe import Overrides
from qbench.text import some

if TYPE_CHECKING:
    from qbench.plan import Cell, Plan
    from qbench.records import Record
    from qbench.runner.progress import Display

FOR_TABLES = (
    "qbench.comparison.compare", "qbench.tables", "pyarrow.parquet", "pyarrow.pandas_compat",
)  # fmt: skip


def run(
    recipe: RecipeOrOptions = None,
    checkpoint: Checkpoints = [],  # noqa: B006  typer copies it
    quantizers: Quantizers = None,
    tasks: Tasks = None,
    definitions: Definitions = None,
    data: Data = None,
    skip_missing: SkipMissing = False,
    calibration: Calibration = None,
    limit: Limit = None,
    dtype: DtypeOption = None,
    scoring: ScoringOption = None,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
    plugin: PluginOption = [],  # noqa: B006
    force: Annotated[
        bool, typer.Option("--force", help="Run cells again that have a good record.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(metavar="all|N", help="GPUs of this host to use. Default: one.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells side by side on each GPU, one process each, so that one is quantized while "
            "others are scored. Default: 3 on a GPU, 1 on a CPU.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    executor: ExecutorOption = None,
    save_recipe: Annotated[
        Path | None, to_file("Write what is run as a recipe, with absolute paths.")
    ] = None,
) -> None:
    """Quantize, audit and score every cell of a recipe, or of options alone; write records and
    delta tables.

    Finished cells are reused, so a run that was stopped goes on where it stopped. Exit code 1
    where a cell failed (it is tried again next time), 2 for input that cannot work.
    """
    overrides = Overrides(
        checkpoints=named(checkpoint),
        quantizers=listed("--quantizers", quantizers),
        tasks=listed("--tasks", tasks),
        definitions=definitions,
        data=data,
        skip_missing=skip_missing,
        calibration=calibration,
        limit=limit,
        dtype=dtype,
        scoring=scoring,
    )
    where = {"gpus": gpus, "workers": workers, "own": executor}
    start_workers(device, cluster, workers=workers, own=executor)
    from qbench.cell import cache_folder
    from qbench.cli.results import show_tables  # beside the process's own imports
    from qbench.comparison.lines import read_noise
    from qbench.plan import cell_names, select
    from qbench.recipe import save
    from qbench.runner.grid import readable
    from qbench.store import Store

    job = make_job(recipe, overrides, out=out, device="cpu" if cluster else device)
    if save_recipe is not None:
        save(recipe, overrides, save_recipe)
    require_folder(job.out, "--out")
    require_folder(cache_folder(), "$QBENCH_CACHE")
    read_noise(Store(job.out))  # the tables at the end read it: refused before work begins
    names = select(cell_names(job.recipe), only)
    with placed(job, device, cluster, **where, cells=len(names)) as place:
        planned, records = _run_cells(place, only, force)
        place.end()
        show_tables(Store(job.out, grid=readable(planned.grid, Store(job.out))))
    broken = [record for record in records if record.status == "failed" or record.failed_tasks]
    if broken:
        cells_failed = some([record.cell for record in broken])
        what = "failed" if any(record.status == "failed" for record in broken) else "lack a task"
        complain(f"{len(broken)} of {len(records)} cells {what}, as said above: {cells_failed}")
        raise typer.Exit(1)


def _run_cells(place: Place, only: str | None, force: bool) -> tuple[Plan, list[Record]]:
    """The plan, and the records of the cells like ``only``, with progress on the terminal."""
    from qbench.runner.estimates import TimeLeft, earlier, estimate
    from qbench.runner.grid import run_cells, total
    from qbench.runner.progress import Display

    planned, out = place.job.plan(only), place.job.out
    cells = planned.select(only)
    records = earlier(out)
    known = {cell.name: estimate(cell, planned, records) for cell in cells}
    left = TimeLeft(
        [cell.name for cell in cells],
        earlier={name: one.seconds for name, one in known.items() if one is not None},
        tasks=len(planned.tasks),
        at_once=place.at_once,
    )
    with terminal() as screen, Display(screen, len(cells), left) as display:
        _announce(planned, cells, display)
        if place.description:
            display.log(place.description)
        if place.executor is not None:  # what the tables need, while this process only waits
            threading.Thread(target=_import_statistics, daemon=True).start()
        start, begun = time.monotonic(), datetime.now(UTC)
        records = run_cells(
            planned, out=out, cells=cells, executor=place.executor, progress=display, force=force
        )
        if made := [record for record in records if record.started >= begun]:
            display.log(total(made, time.monotonic() - start))
    return planned, records


def _import_statistics() -> None:
    with contextlib.suppress(Exception):  # said where they are used
        for module in FOR_TABLES:
            importlib.import_module(module)


def plan(
    recipe: RecipeOrOptions = None,
    checkpoint: Checkpoints = [],  # noqa: B006
    quantizers: Quantizers = None,
    tasks: Tasks = None,
    definitions: Definitions = None,
    data: Data = None,
    skip_missing: SkipMissing = False,
    calibration: Calibration = None,
    limit: Limit = None,
    dtype: DtypeOption = None,
    scoring: ScoringOption = None,
    only: Only = None,
    out: OutToRead = None,
    device: DeviceOption = Device.auto,
    plugin: PluginOption = [],  # noqa: B006
) -> None:
    """Show what `qbench run` would do, and what is there already. Runs nothing.

    Exit code 2 where a cell can never run.
    """
    from qbench.cli.planning import plan_lines
    from qbench.plan import require_runnable
    from qbench.store import Store

    overrides = Overrides(
        checkpoints=named(checkpoint),
        quantizers=listed("--quantizers", quantizers),
        tasks=listed("--tasks", tasks),
        definitions=definitions,
        data=data,
        skip_missing=skip_missing,
        calibration=calibration,
        limit=limit,
        dtype=dtype,
        scoring=scoring,
    )
    job = make_job(recipe, overrides, out=out, device=device)
    planned = job.plan(only, show=True)
    for line in plan_lines(planned, Store(job.out), only):
        typer.echo(line)
    require_runnable(planned.select(only))


def _announce(planned: Plan, cells: Sequence[Cell], display: Display) -> None:
    """What this run computes on and reads: nothing is chosen in silence."""
    total = len(planned.cells)
    count = f"{total} cells" if len(cells) == total else f"{len(cells)} of {total} cells"
    from qbench.cli.planning import how, notes

    display.log(f"{count} on {how(planned, cells)}")
    for line in notes(cells):
        display.log(line)
    if planned.calibration is not None:
        display.log(f"calibration text: {planned.calibration.path}")
