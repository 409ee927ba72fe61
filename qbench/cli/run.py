"""Run the cells of a recipe (``qbench run``), or show them with their cost (``qbench plan``): in
this process, in processes of this host, or on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from qbench.checkpoints.find import elements
from qbench.cli.app import complain, show_tables
from qbench.cli.options import DeviceOption, NewFile, Only, Out, RecipeOrOptions
from qbench.errors import RecipeError, UnavailableError, some
from qbench.evaluation.settings import hidden_size
from qbench.evaluation.tasks import TaskSpec
from qbench.files import cache_folder, require_folder
from qbench.machine import (
    GIB,
    choose_device,
    cores,
    cpu_flags,
    fast_bf16,
    gpu_slots,
    memory_gib,
    terminal,
)
from qbench.plan import Cell, Plan, cell_names, require_runnable, select, streams
from qbench.plan import plan as plan_recipe
from qbench.recipe import Overrides, Recipe, added_column, save
from qbench.records import Record
from qbench.runner.grid import is_up_to_date, run_cells
from qbench.runner.progress import Display
from qbench.runner.workers import Workers, drop_early
from qbench.store import Store
from qbench.text import duration, group_by_reason


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

    @contextlib.contextmanager
    def display(self, cells: int) -> Iterator[Display]:
        """Yield the display of the progress of so many ``cells`` on the terminal, which has printed
        the description first."""
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
    """Read and check a recipe; return a launcher that runs its cells in this process. ``out`` None:
    results/NAME. With a ``cluster``, ``device`` may stay "auto": ``launch`` asks the workers."""
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
    launcher: Launcher, cells: int, *, cluster: str | None, gpus: str | None, workers: int | None
) -> Iterator[Launcher]:
    """Start what runs the cells; yield a launcher with its executor. ``cells`` is the number of
    cells; the others are options of ``qbench run``. Without an executor ``launcher`` itself is
    yielded. Raises QbenchError for what is not there, and for options that exclude each other."""
    device_map = launcher.recipe.evaluation.device_map
    places = {
        "evaluation.device_map": device_map, "--cluster": cluster, "--gpus": gpus,
        "--workers": workers,
    }  # fmt: skip
    first, *others = [name for name, value in places.items() if value is not None] or [""]
    if others and first != "--gpus":
        raise RecipeError(
            f"{first} and {others[0]} exclude each other: both say where cells run; leave one out"
        )
    slots = []
    if cluster is None and device_map is None:
        slots = gpu_slots(gpus, workers, launcher.device, at_most=cells)
    if not slots:
        drop_early()
    if cluster is not None:
        if importlib.util.find_spec("distributed") is None:
            raise UnavailableError("--cluster: Dask is not installed; pip install -e '.[cluster]'")
        from qbench.runner.dask import connected  # an extra, and a second to import

        device = None if launcher.device == "auto" else launcher.device
        with connected(cluster, device, folders=[launcher.out, cache_folder()]) as dask:
            yield dataclasses.replace(
                launcher, device=dask.device, gpu=dask.expected["GPU"], executor=dask,
                description=dask.description,
            )  # fmt: skip
    elif slots:
        processes = Workers(slots, device=launcher.device)
        processes.preload()
        try:
            yield dataclasses.replace(launcher, executor=processes)
        finally:
            processes.shutdown(cancel_futures=True)
    else:
        yield launcher


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
    cluster: Annotated[str | None, typer.Option(metavar="ADDRESS")] = None,
    save_recipe: NewFile = None,
) -> None:
    """Quantize, audit and score every cell of a recipe, or of options alone; write records and
    delta tables.

    Finished cells are reused, so a stopped run continues. Exit code 1 if a cell failed (it is
    tried again next time), 2 for input that cannot work, such as a broken checkpoint.

    Examples:
    qbench run recipes/demo.yaml
    qbench run recipes/gptq.yaml --only "softpick/*" --gpus all
    qbench run --checkpoint mine=DIR --quantizers bf16,hqq-4bit --tasks piqa,arc_easy

    Options:
    force: Run cells again that have a finished record.
    gpus: GPUs of this host to use. Default: one.
    workers: Cells side by side on each GPU, one process each: one is quantized while others are
        scored. Default: 3 on a GPU, 4 if its memory and the host's cores suffice; 1 on a CPU.
    cluster: Run cells on a Dask cluster: the tcp:// address of its scheduler, or a scheduler file.
    save_recipe: Write this run as a recipe, with absolute paths.
    """
    launcher = load_launcher(recipe, overrides, out=out, device=device, cluster=cluster)
    cells = len(select(cell_names(launcher.recipe), only))
    require_folder(launcher.out, "--out")
    require_folder(cache_folder(), "$QBENCH_CACHE")
    if save_recipe is not None:
        save(recipe, overrides, save_recipe)
    # its processes import libraries while the run is planned
    with launch(launcher, cells, cluster=cluster, gpus=gpus, workers=workers) as launcher:
        planned, records = _run_cells(launcher, only, force, grow=workers is None)
    chosen = None
    if only is not None:  # tables also show finished cells that --only leaves out
        chosen = {record.cell for record in (*records, *Store(launcher.out).records())}
    store = Store(launcher.out, manifest=planned.manifest(chosen))
    show_tables(store)
    typer.echo(f"All of it: qbench view {shlex.quote(str(launcher.out))}", err=True)
    broken = [record for record in records if record.status == "failed" or record.failed_tasks]
    if broken:
        names = some([record.cell for record in broken])
        what = "failed" if any(record.status == "failed" for record in broken) else "lack a task"
        log = store.path(broken[0], ".log")
        where = f"; log of the first: {log}" if log.is_file() else ""
        complain(f"{len(broken)} of {len(records)} cells {what}, as said above: {names}{where}")
        raise typer.Exit(2 if any(record.bad_input for record in broken) else 1)


def _run_cells(
    launcher: Launcher, only: str | None, force: bool, *, grow: bool
) -> tuple[Plan, list[Record]]:
    """Plan and run the cells that match ``only``, with progress on the terminal; return the plan
    and the records. ``grow``: with as many worker processes as the GPUs' memory holds."""
    planned = plan_recipe(launcher.recipe, device=launcher.device, gpu=launcher.gpu, only=only)
    out, cells = launcher.out, planned.select(only)
    if grow and isinstance(launcher.executor, Workers) and planned.device == "cuda":
        gib = max(memory_of(cell, planned) for cell in cells)
        launcher.executor.grow(gib, at_most=len(cells))
    with launcher.display(len(cells)) as display:
        kept = "" if force else " (finished ones are kept)"
        count = f"{len(cells)} of {len(planned.cells)} cells chosen{kept}"
        display.log(f"{count}, on {how(planned, cells)}")
        for line in notes(planned, cells):  # nothing is chosen in silence
            display.log(line)
        if planned.calibration is not None:
            display.log(f"calibration text: {planned.calibration.path}")
        begun = datetime.now(UTC)
        if launcher.executor is not None:  # while others work
            Thread(target=import_for_tables, daemon=True).start()
        records = run_cells(
            planned, out=out, cells=cells, executor=launcher.executor, progress=display, force=force
        )
        made = sum(record.started >= begun for record in records)
        took = (datetime.now(UTC) - begun).total_seconds()
        display.log(f"{made} of {len(records)} cells were run, in {took:.0f} s")
    return planned, records


def import_for_tables() -> None:
    """Import what the tables of a run's results need, scipy, pandas and pyarrow among it."""
    for name in ("qbench.comparison.compare", "qbench.tables", "pandas", "pyarrow.parquet"):
        import_module(name)


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
    qbench plan recipes/demo.yaml
    qbench plan recipes/gptq.yaml --data DIR --device cpu
    """
    launcher = load_launcher(recipe, overrides, out=out, device=device)
    planned = plan_recipe(launcher.recipe, device=launcher.device, only=only, show=True)
    for line in plan_lines(planned, Store(launcher.out), only):
        typer.echo(line)
    require_runnable(planned.select(only))


def plan_lines(planned: Plan, store: Store, only: str | None) -> Iterator[str]:
    """Yield the lines of ``qbench plan``, of cells that match ``only``: tasks, checkpoints with
    sizes, cells with state and cost, and settings that were chosen for models."""
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
    todo, seconds = list[str](), list[float]()
    for cell in cells:
        record = store.get_valid(cell.grid_cell)
        about = f"{cell.name}  key {cell.key[:16]}"
        if cell.unsupported_reason is not None:
            yield f"refused   {about}"
        elif is_up_to_date(record, cell, planned, store, cache_folder(), made=todo):
            yield f"finished  {about}"
        else:
            todo.append(cell.key)
            if (cost := estimate(cell, planned)) is not None:
                seconds.append(cost[0])
                about += f"  about {duration(cost[0])}, {_memory(cell, planned, cost[1])}"
            yield f"{'to run  ' if record is None else 'to retry'}  {about}"
    if seconds:
        yield (
            f"{len(seconds)} of {len(todo)} cells to run take about {duration(sum(seconds))} one "
            "after the other, by their shapes and usual rates: right within a factor of three"
        )
    yield from notes(planned, cells)
    yield f"results go to {store.directory}"


def how(planned: Plan, cells: Sequence[Cell]) -> str:
    """Return a line with the device, and the attention and scoring modes of the cells."""
    attention = dict.fromkeys(cell.attention for cell in cells)
    scoring = dict.fromkeys(cell.scoring.mode for cell in cells)
    return f"{planned.device}, attention {' and '.join(attention)}, scoring {' and '.join(scoring)}"


def notes(planned: Plan, cells: Sequence[Cell]) -> list[str]:
    """Return a line for each setting that is chosen for some models only, for a dtype that is slow
    here, and for a run without an unquantized cell."""
    pairs = dict.fromkeys((cell.checkpoint_name, note) for cell in cells for note in cell.notes)
    lines = group_by_reason(pairs)
    dtypes = {cell.quantization.compute_dtype for cell in cells}
    if planned.device == "cpu" and "bfloat16" in dtypes and not fast_bf16():
        lines.append(
            "this processor has no bfloat16 instructions, so bfloat16 is about ten times slower "
            "than float32 here; --dtype float32 avoids that"
        )
    quantized = all(cell.quantization.precision.quantized for cell in planned.cells)
    if quantized and not planned.recipe.without_baseline:
        lines.append(
            "no damage is measured: add an unquantized precision to quantizers, such as bf16"
        )
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
            f"{count / 1e6:,.3g} million parameters, {size:.3g} GiB in "
            f"{cell.quantization.compute_dtype}"
        )


def _documents(task: TaskSpec, limit: int | None) -> str:
    """Return how many documents of ``task`` are scored, as text."""
    if task.documents is not None:
        return f"{min(task.documents, limit or task.documents)} of {task.documents} documents"
    data, count = task.hub_data, f"the first {limit}" if limit else "all"
    return f"{count} documents" + (f" of {data.repository} at {data.commit[:12]}" if data else "")


# --- estimates of the time and memory that cells take


BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BYTES_PER_TOKEN = 3.7  # of task files, each context once
REPEATED = 1.6  # contexts that are scored anew with each answer, and padding
BASE_GIB = {"cuda": 2.1, "cpu": 0.8}  # libraries, batches
# Of what calibration keeps of a block: on a CPU the C library keeps freed memory of each thread
HELD = {"cuda": 1.0, "cpu": 1.5}
SLOW_BF16, AMX_BF16 = 10.0, 0.15  # times float32, on processors without instructions and with AMX
DISK_RATE = 1.0  # GiB per second
# Of one GPU, or of one core of a CPU in float32, as in docs/speed.md: operations per second by
# scoring mode, seconds for 10⁹ weights with their audit, seconds before a cell computes anything
RATES = {
    "cuda": {"fast": 2e14, "exact": 9e13, "lm-eval": 2e13, "rounding": 3.0, "calibrating": 15.0,
             "fixed": 6.0},
    "cpu": {"fast": 3e10, "exact": 2.5e10, "lm-eval": 2e10, "rounding": 200.0,
            "calibrating": 250.0, "fixed": 2.0},
}  # fmt: skip


def estimate(cell: Cell, plan: Plan) -> tuple[float, float] | None:
    """Return about how many seconds ``cell`` takes, and its ``memory_of``, by its shapes and
    ``RATES``: right within a factor of about three. None if the amount of text is not known."""
    tokens = _tokens(cell, plan)
    if tokens is None:
        return None
    rates, dtype = RATES[plan.device], cell.quantization.compute_dtype
    parameters = elements(cell.checkpoint.headers)
    forward = 2 * parameters / (1 if plan.device == "cuda" else cores())
    if plan.device == "cpu" and dtype != "float32":
        forward *= AMX_BF16 if "amx_bf16" in cpu_flags() else 1.0 if fast_bf16() else SLOW_BF16
    seconds = rates["fixed"] + 3 * parameters * BYTES[dtype] / GIB / DISK_RATE  # load and audit
    seconds += forward * tokens / rates[cell.scoring.mode]
    if cell.quantization.precision.quantized:
        kind = "rounding" if cell.calibration is None else "calibrating"
        seconds += rates[kind] * parameters / 1e9
    if (text := cell.calibration) is not None:
        seconds += forward * text.samples * text.length / rates["exact"]
    return seconds, memory_of(cell, plan)


def memory_of(cell: Cell, plan: Plan) -> float:
    """Return about how many GiB of memory ``cell`` takes, of the GPU or else the process."""
    itemsize = BYTES[cell.quantization.compute_dtype]
    weights = elements(cell.checkpoint.headers) * itemsize / GIB
    # the audit holds the original beside
    memory = BASE_GIB[plan.device] + weights * (1 + cell.quantization.precision.quantized)
    if (text := cell.calibration) is not None:
        states, hidden = text.samples * text.length, hidden_size(cell.checkpoint.config)
        widest = max(h.shape[-1] for h in cell.checkpoint.headers.values() if len(h.shape) > 1)
        token = itemsize / GIB  # of one number per token
        memory += states * hidden * token
        paused = states * (4 * hidden + 2 * widest) * token  # as in quantizers/calibration.py
        if paused < memory_gib(plan.device) / 2:
            memory += HELD[plan.device] * paused
    return memory


def _memory(cell: Cell, plan: Plan, gib: float) -> str:
    """Return the memory of a cell as text: whether ``gib`` fits, or that weights are streamed."""
    weights = elements(cell.checkpoint.headers) * BYTES[cell.quantization.compute_dtype]
    if streams(cell, plan, weights, lambda: memory_gib("cuda") * GIB):
        return "and longer, as its weights come block by block"
    room = memory_gib(plan.device)
    return f"{gib:.1f} GiB" + (f": does not fit into {room:.1f} GiB" if gib > room else "")


def _tokens(cell: Cell, plan: Plan) -> float | None:
    """Return about how many tokens the model reads, padding and repeated contexts included; None if
    the size of a task's data is unknown."""
    total, limit = 0.0, plan.recipe.evaluation.limit
    for task in plan.tasks:
        if task.documents is None or not task.files:
            return None
        size = task.files[0].path.stat().st_size / BYTES_PER_TOKEN
        total += size * min(1.0, (limit or task.documents) / task.documents)
    return total if cell.scoring.mode == "fast" else total * REPEATED
