"""Run the cells of a recipe (``qbench run``), or show them with their cost (``qbench plan``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from threading import Thread
from typing import Annotated

import typer

from qbench.checkpoints.find import elements
from qbench.cli.app import complain
from qbench.cli.launcher import Launcher, launch, load_launcher
from qbench.cli.options import (
    Against,
    ClusterOption,
    DeviceOption,
    ExecutorOption,
    NewFile,
    Only,
    Out,
    RecipeOrOptions,
)
from qbench.errors import RecipeError, some
from qbench.evaluation.tasks import TaskSpec
from qbench.files import cache_folder, require_folder
from qbench.machine import GIB, fast_bf16, memory_gib
from qbench.plan import Cell, Plan, cell_names, require_runnable, select
from qbench.recipe import Overrides, save
from qbench.records import Record
from qbench.runner.estimates import BYTES, Estimate, estimate
from qbench.runner.grid import find_kept, is_up_to_date, run_cells
from qbench.store import Store
from qbench.text import duration, group_by_reason


def run(
    *,
    recipe: RecipeOrOptions = None,
    overrides: Overrides,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = "auto",
    force: bool = False,
    gpus: Annotated[str | None, typer.Option(metavar="all|N")] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    cluster: ClusterOption = None,
    executor: ExecutorOption = None,
    against: Against = None,
    save_recipe: NewFile = None,
) -> None:
    """Quantize, audit and score every cell of a recipe, or of options alone; write records and
    delta tables.

    Finished cells are reused, so a run that was stopped goes on where it stopped. Exit code 1
    if a cell failed (it is tried again next time), 2 for input that cannot work.

    Examples:
    ```
    qbench run recipes/demo.yaml
    qbench run recipes/gptq.yaml --only "softpick/*" --gpus all
    qbench run --checkpoint mine=DIR --quantizers bf16,hqq-4bit --tasks piqa,arc_easy
    ```

    Options:
    force: Run cells again that have a finished record.
    gpus: GPUs of this host to use. Default: one.
    workers: Cells side by side on each GPU, one process each: one is quantized while others are
        scored. Default: 3 on a GPU, 1 on a CPU.
    save_recipe: Write this run as a recipe, with absolute paths.
    """
    launcher = load_launcher(recipe, overrides, out=out, device=device, cluster=cluster)
    names, checkpoints = cell_names(launcher.recipe), list(launcher.recipe.checkpoints)
    if against is not None and (len(checkpoints) > 1 or f"{checkpoints[0]}/{against}" not in names):
        raise RecipeError(
            f"--against {against}: names a precision of a run with one checkpoint; there are "
            f"{', '.join(names)}"
        )
    cells = len(select(names, only))
    require_folder(launcher.out, "--out")
    require_folder(cache_folder(), "$QBENCH_CACHE")
    if save_recipe is not None:
        save(recipe, overrides, save_recipe)
    with launch(
        launcher, cluster, gpus=gpus, workers=workers, executor=executor, cells=cells
    ) as launcher:  # its processes import libraries while the run is planned
        planned, records = _run_cells(launcher, only, force)
    from qbench.cli.results import show_tables  # pandas

    store = Store(launcher.out, manifest=planned.manifest)
    if only is not None:  # others that are there stand beside; the rest was not asked for
        chosen = {record.cell for record in (*records, *store.records())}
        store = Store(launcher.out, manifest=planned.manifest_of(chosen))
    show_tables(store, against=against)
    typer.echo(f"All of it: qbench view {launcher.out}", err=True)
    broken = [record for record in records if record.status == "failed" or record.failed_tasks]
    if broken:
        cells_failed = some([record.cell for record in broken])
        what = "failed" if any(record.status == "failed" for record in broken) else "lack a task"
        log = Store(launcher.out).log(broken[0])
        said = f"; what libraries said of the first: {log}" if log.is_file() else ""
        complain(
            f"{len(broken)} of {len(records)} cells {what}, as said above: {cells_failed}{said}"
        )
        raise typer.Exit(1)


def _run_cells(launcher: Launcher, only: str | None, force: bool) -> tuple[Plan, list[Record]]:
    """Plan and run the cells that match ``only``, with progress on the terminal; return the plan
    and the records."""
    planned, out = launcher.plan(only), launcher.out
    cells = planned.select(only)
    with launcher.display(len(cells)) as display:
        display.log(f"{len(cells)} of {len(planned.cells)} cells on {how(planned, cells)}")
        for line in notes(planned, cells):  # nothing is chosen in silence
            display.log(line)
        if planned.calibration is not None:
            display.log(f"calibration text: {planned.calibration.path}")
        begun = datetime.now(UTC)
        if launcher.executor is not None:  # while others work: pandas and scipy, for the tables
            Thread(target=import_module, args=("qbench.cli.results",), daemon=True).start()
        records = run_cells(
            planned, out=out, cells=cells, executor=launcher.executor, progress=display, force=force
        )
        made = sum(record.started >= begun for record in records)
        took = (datetime.now(UTC) - begun).total_seconds()
        display.log(f"{made} of {len(records)} cells were run, in {took:.0f} s")
    return planned, records


def plan(
    *,
    recipe: RecipeOrOptions = None,
    overrides: Overrides,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = "auto",
) -> None:
    """Show what `qbench run` would do, and which cells are finished. Runs nothing.

    Exit code 2 if a cell can never run.

    Examples:
    ```
    qbench plan recipes/demo.yaml
    qbench plan recipes/gptq.yaml --data DIR --device cpu
    ```
    """
    launcher = load_launcher(recipe, overrides, out=out, device=device)
    planned = launcher.plan(only, show=True)
    for line in plan_lines(planned, Store(launcher.out), only):
        typer.echo(line)
    require_runnable(planned.select(only))


def plan_lines(planned: Plan, store: Store, only: str | None) -> Iterator[str]:
    """Yield the lines of ``qbench plan``: tasks, checkpoints with sizes, cells with state and cost,
    and settings that were chosen for models."""
    for name in planned.skipped:
        yield f"left out  {name}: no data"
    for task in planned.tasks:
        yield f"task  {task.label}: {_documents(task, planned.recipe.evaluation.limit)}"
    if planned.calibration is not None:
        text = planned.calibration
        first = {True: ", BOS first", None: ", BOS as the tokenizer does"}.get(text.bos, "")
        yield f"calibration  {text.samples} × {text.length} tokens of {text.path}{first}"
    cells = planned.select(only)
    yield f"on {how(planned, cells)}"
    yield from _sizes(cells)
    todo, estimates = list[str](), list[Estimate]()
    for cell in cells:
        record = store.get_valid(cell.grid_cell)
        about = f"{cell.name}  key {cell.key[:16]}"
        if cell.unsupported_reason is not None:
            yield f"refused   {about}"
        elif is_up_to_date(record, cell, planned, store, cache_folder(), made=todo):
            yield f"finished  {about}"
        elif record is None and find_kept(cell, cache_folder()):
            yield f"cached    {about}"
        else:
            todo.append(cell.key)
            if (cost := estimate(cell, planned)) is not None:
                estimates.append(cost)
                about += f"  {cost}"
                if cost.memory_gib > (room := memory_gib(planned.device)):
                    about += f": does not fit into {room:.1f} GiB"
            yield f"{'to run  ' if record is None else 'to retry'}  {about}"
    if estimates:
        seconds = duration(sum(cost.seconds for cost in estimates))
        yield (
            f"{len(estimates)} of {len(todo)} cells to run take about {seconds} one after the "
            "other, by their shapes and usual rates: right within a factor of three"
        )
    yield from notes(planned, cells)
    yield f"results go to {store.directory}"


def how(planned: Plan, cells: Sequence[Cell]) -> str:
    """Return the device, and the attention and scoring modes that the cells use."""
    attention = dict.fromkeys(cell.attention for cell in cells)
    scoring = dict.fromkeys(cell.scoring.mode for cell in cells)
    return f"{planned.device}, attention {' and '.join(attention)}, scoring {' and '.join(scoring)}"


def notes(planned: Plan, cells: Sequence[Cell]) -> list[str]:
    """Return a line for each setting that is chosen for some models only, for a dtype that is slow
    here, and for a run without an unquantized cell."""
    lines = group_by_reason(
        dict.fromkeys((c.checkpoint_name, note) for c in cells for note in c.notes)
    )
    dtypes = {cell.quantization.compute_dtype for cell in cells}
    if planned.device == "cpu" and "bfloat16" in dtypes and not fast_bf16():
        lines.append(
            "this processor has no bfloat16 instructions, so bfloat16 is about ten times slower "
            "than float32 here; --dtype float32 avoids that"
        )
    quantized = all(cell.quantization.precision.quantized for cell in planned.cells)
    if quantized and not planned.recipe.without_baseline:
        lines.append("no damage is measured: add an unquantized precision to quantizers, as bf16")
    return lines


def _sizes(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a line per checkpoint: the number of its weights, and their size unquantized."""
    seen: set[str] = set()
    for cell in cells:
        if cell.checkpoint_name in seen:
            continue
        seen.add(cell.checkpoint_name)
        count = elements(cell.checkpoint.headers)
        size = count * BYTES[cell.quantization.compute_dtype] / GIB
        yield (
            f"checkpoint  {cell.checkpoint_name}: {cell.checkpoint.class_name}, "
            f"{_shown(count)} parameters, {size:.3g} GiB in {cell.quantization.compute_dtype}"
        )


def _shown(count: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.{max(0, 2 - int(math.log10(count / unit)))}f} {name}"
    return f"{count:,}"


def _documents(task: TaskSpec, limit: int | None) -> str:
    if task.hub_data is not None:
        data = task.hub_data
        first = f"the first {limit}" if limit else "all"
        return f"{first} documents of {data.repository} at {data.commit[:12]}"
    if task.documents is None:
        return f"the first {limit} documents" if limit else "all documents"
    return f"{min(task.documents, limit or task.documents)} of {task.documents} documents"
