"""``qbench plan``: what a run would do, and what it will take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import typer

from qbench.cache import cache_folder
from qbench.checkpoints.find import elements, read_headers
from qbench.cli.options import Device, DeviceOption, Only, Out, RecipeOrOptions
from qbench.cli.place import here
from qbench.cli.recipe_options import recipe_options
from qbench.evaluation.tasks import TaskSpec
from qbench.machine import GIB, fast_bf16, memory_gib
from qbench.plan import Cell, Plan, require_runnable
from qbench.recipe import Overrides
from qbench.runner.estimates import BYTES, Estimate, earlier, expected
from qbench.runner.grid import known_elsewhere, passes
from qbench.store import Store
from qbench.text import duration


@recipe_options()
def plan(
    *,
    recipe: RecipeOrOptions = None,
    overrides: Overrides,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Show what `qbench run` would do, and what is there already. Runs nothing.

    Exit code 2 where a cell can never run.

    Examples:
    ```
    qbench plan recipes/demo.yaml
    qbench plan recipes/gptq.yaml --data DIR --device cpu
    ```
    """
    place = here(recipe, overrides, out=out, device=device)
    planned = place.plan(only, show=True)
    for line in plan_lines(planned, Store(place.out), only):
        typer.echo(line)
    require_runnable(planned.select(only))


def plan_lines(planned: Plan, store: Store, only: str | None) -> Iterator[str]:
    """Tasks, checkpoints with their sizes, cells with their state and what they will take, and
    what was chosen for models."""
    for name in planned.skipped:
        yield f"left out  {name}: no data"
    for task in planned.tasks:
        yield f"task  {task.label}: {_documents(task, planned.recipe.evaluation.limit)}"
    if planned.calibration is not None:
        text = planned.calibration
        first = ", BOS first" if text.bos else ""
        yield f"calibration  {text.samples} × {text.length} tokens of {text.path}{first}"
    cells = planned.select(only)
    yield f"on {how(planned, cells)}"
    yield from _sizes(cells)
    records = earlier(store.directory)
    todo, known = 0, list[Estimate]()
    for cell in cells:
        record = store.whole(cell.grid_cell)
        about = f"{cell.name}  key {cell.key[:16]}"
        if cell.refusal is not None:
            yield f"refused   {about}"
        elif record is not None and passes(record, cell):
            yield f"there     {about}"
        elif record is None and (found := known_elsewhere(cell, store, cache_folder())):
            yield f"known     {about}  in {found[0].directory}"
        else:
            todo += 1
            if (one := expected(cell, planned, records)) is not None:
                known.append(one)
                about += f"  {one}"
                if one.memory_gib > (room := memory_gib(planned.device)):
                    about += f": does not fit into {room:.1f} GiB"
            yield f"{'to run  ' if record is None else 'to retry'}  {about}"
    if known:
        seconds = duration(sum(one.seconds for one in known))
        yield (
            f"{len(known)} of {todo} cells to run take about {seconds} one after the other, "
            f"{sum(one.measured for one in known)} of them by earlier records of the same weights "
            "on this hardware, others by their shapes, within a factor of three"
        )
    yield from notes(planned, cells)
    yield f"results go to {store.directory}"


def how(planned: Plan, cells: Sequence[Cell]) -> str:
    """The device, and which attention and scoring were chosen; ``notes`` say for which models."""
    attention = dict.fromkeys(cell.attention for cell in cells)
    scoring = dict.fromkeys(cell.scoring.mode for cell in cells)
    return f"{planned.device}, attention {' and '.join(attention)}, scoring {' and '.join(scoring)}"


def notes(planned: Plan, cells: Sequence[Cell]) -> list[str]:
    """What was chosen for models that others would not get, each once, with their names; and where
    a dtype is slow here."""
    names: dict[str, dict[str, None]] = {}
    for cell in cells:
        for note in cell.notes:
            names.setdefault(note, {})[cell.checkpoint_name] = None
    lines = [f"{', '.join(of)}: {note}" for note, of in names.items()]
    dtypes = {cell.quantization.compute_dtype for cell in cells}
    if planned.device == "cpu" and "bfloat16" in dtypes and not fast_bf16():
        lines.append(
            "this processor has no bfloat16 instructions, so bfloat16 is about ten times slower "
            "than float32 here; --dtype float32 avoids that"
        )
    return lines


def _sizes(cells: Sequence[Cell]) -> Iterator[str]:
    """Weights of each checkpoint: their number, and their size unquantized."""
    seen: set[str] = set()
    for cell in cells:
        if cell.checkpoint_name in seen:
            continue
        seen.add(cell.checkpoint_name)
        count = elements(read_headers(cell.checkpoint.folder, quantized=True))
        size = count * BYTES[cell.quantization.compute_dtype] / GIB
        yield (
            f"checkpoint  {cell.checkpoint_name}: {cell.checkpoint.support.name}, "
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
