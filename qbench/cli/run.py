"""Commands that run recipes: run, plan, noise. Options read and checked, and where cells run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.options import (
    Calibration,
    CalibrationLength,
    CalibrationSamples,
    Checkpoints,
    CheckpointsOfRecipe,
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
    RecipeFile,
    RecipeOrOptions,
    ScoringOption,
    SkipMissing,
    Tasks,
    complain,
    show_written,
    to_file,
)
from qbench.errors import EvaluationError, RecipeError
from qbench.files import require_folder
from qbench.machine import terminal
from qbench.text import some

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from qbench.evaluation.noise import Noise
    from qbench.evaluation.tasks import TaskSpec
    from qbench.plan import Cell, Plan
    from qbench.recipe import Overrides, Recipe
    from qbench.records import Record
    from qbench.runner.progress import Display
    from qbench.store import Store

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
    executor.preload()
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
    """What takes seconds from now on, while the recipe is read: the GPU's driver starts, or the
    fork server imports what cells need, where these may run in processes of this host."""
    from qbench.machine import cuda_is_likely, cuda_problem
    from qbench.runner.workers import start_forkserver

    if cluster is not None or own is not None:
        return
    if device != "cpu" and cuda_is_likely():
        threading.Thread(target=cuda_problem, daemon=True).start()
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
    calibration_samples: CalibrationSamples = None,
    calibration_length: CalibrationLength = None,
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
    from qbench.recipe import Overrides

    overrides = Overrides(
        checkpoints=named(checkpoint),
        quantizers=listed("--quantizers", quantizers),
        tasks=listed("--tasks", tasks),
        definitions=definitions,
        data=data,
        skip_missing=skip_missing,
        calibration=calibration,
        calibration_samples=calibration_samples,
        calibration_length=calibration_length,
        limit=limit,
        dtype=dtype,
        scoring=scoring,
    )
    where = {"gpus": gpus, "workers": workers, "own": executor}
    start_workers(device, cluster, workers=workers, own=executor)
    from qbench.plan import cell_names, select

    job = make_job(recipe, overrides, out=out, device="cpu" if cluster else device)
    names = select(cell_names(job.recipe), only)
    with placed(job, device, cluster, **where, cells=len(names)) as place:
        # beside the workers' own imports
        from qbench.cell import cache_folder
        from qbench.cli.results import show_tables
        from qbench.comparison.lines import read_noise
        from qbench.recipe import save
        from qbench.runner.grid import readable
        from qbench.store import Store

        if save_recipe is not None:
            save(recipe, overrides, save_recipe)
        require_folder(job.out, "--out")
        require_folder(cache_folder(), "$QBENCH_CACHE")
        read_noise(Store(job.out))  # the tables at the end read it: refused before work begins
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
    calibration_samples: CalibrationSamples = None,
    calibration_length: CalibrationLength = None,
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
    from qbench.plan import require_runnable
    from qbench.recipe import Overrides
    from qbench.store import Store

    overrides = Overrides(
        checkpoints=named(checkpoint),
        quantizers=listed("--quantizers", quantizers),
        tasks=listed("--tasks", tasks),
        definitions=definitions,
        data=data,
        skip_missing=skip_missing,
        calibration=calibration,
        calibration_samples=calibration_samples,
        calibration_length=calibration_length,
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
    display.log(f"{count} on {how(planned, cells)}")
    for line in notes(cells):
        display.log(line)
    if planned.calibration is not None:
        display.log(f"calibration text: {planned.calibration.path}")


GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def plan_lines(planned: Plan, store: Store, only: str | None) -> Iterator[str]:
    """Tasks, checkpoints with their sizes, cells with their state and what they will take, and
    what was chosen for models."""
    from qbench.runner.estimates import duration, earlier, estimate
    from qbench.runner.grid import passes

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
    todo, known, seconds = 0, 0, 0.0
    for cell in cells:
        record = store.whole(cell.grid_cell)
        state = "to run"
        if cell.refusal is not None:
            state = "refused"
        elif record is not None:
            state = "there" if passes(record, cell) else "to retry"
        line = f"{state:9} {cell.name}  key {cell.key[:16]}"
        if state.startswith("to "):
            todo += 1
            found = estimate(cell, planned, records)
            if found is not None:
                known, seconds = known + 1, seconds + found.seconds
                line += f"  {found}"
        yield line
    if known:
        yield (
            f"{known} of {todo} cells to run take about {duration(seconds)} one after the other, "
            "as earlier records of the same weights did on this hardware"
        )
    yield from notes(cells)
    yield f"results go to {store.directory}"


def how(planned: Plan, cells: Sequence[Cell]) -> str:
    """The device, and which attention and scoring were chosen; ``notes`` say for which models."""
    attention = dict.fromkeys(cell.attention for cell in cells)
    scoring = dict.fromkeys(cell.scoring.mode for cell in cells)
    return f"{planned.device}, attention {' and '.join(attention)}, scoring {' and '.join(scoring)}"


def notes(cells: Sequence[Cell]) -> list[str]:
    """What was chosen for models that others would not get: each once, with their names."""
    names: dict[str, dict[str, None]] = {}
    for cell in cells:
        for note in cell.notes:
            names.setdefault(note, {})[cell.checkpoint_name] = None
    return [f"{', '.join(of)}: {note}" for note, of in names.items()]


def _sizes(cells: Sequence[Cell]) -> Iterator[str]:
    """Weights of each checkpoint: their number, and their size unquantized."""
    from qbench.checkpoints.find import elements, read_headers

    seen: set[str] = set()
    for cell in cells:
        if cell.checkpoint_name in seen:
            continue
        seen.add(cell.checkpoint_name)
        count = elements(read_headers(cell.checkpoint.folder))
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
    from qbench.recipe import Overrides
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
