"""The command line: each command a few lines over a public function."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qbench import __version__
from qbench.errors import QbenchError, RecipeError
from qbench.executors import Job, gpu_slots, run_cells
from qbench.quiet import settle, terminal

settle()
app = typer.Typer(
    name="qbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="How much does a quantizer hurt a softpick model, how much a softmax model, and is the "
    "difference real?\n\nStart with `qbench run recipes/demo.yaml`.",
)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class Listing(StrEnum):
    quantizers = "quantizers"
    normalizers = "normalizers"
    tasks = "tasks"


RecipeFile = Annotated[Path, typer.Argument(help="A recipe, such as recipes/gptq.yaml.")]
Folder = Annotated[Path, typer.Argument(help="A results folder that `qbench run` wrote.")]
Checkpoints = Annotated[
    list[str],
    typer.Option(
        "--checkpoint",
        metavar="NAME=PATH_OR_HUB_ID",
        help="Use this folder or hub id for the recipe's checkpoint NAME. Repeatable.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of TASK/SPLIT.jsonl files: score from these, without the hub."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(help="JSON Lines file with a text field: what calibrated quantizers see."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Score the first N documents of each task only.")
]
Only = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Run only cells like this glob: 'softpick/gptq-*'."),
]
Out = Annotated[
    Path | None, typer.Option(help="Results folder. Default: results/NAME of the recipe.")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Compute in this dtype instead of the recipe's, unquantized cells too. Most CPUs are "
        "ten times slower in bfloat16.",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute.")]


@app.command("run")
def run_command(
    recipe: RecipeFile,
    checkpoint: Checkpoints = [],  # noqa: B006  typer copies it
    data: Data = None,
    calibration: Calibration = None,
    limit: Limit = None,
    dtype: DtypeOption = None,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
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
) -> None:
    """Quantize, audit and score every cell of a recipe; write records and delta tables.

    Finished cells are reused, so a run that was stopped goes on where it stopped. Exit code 1
    where a cell failed (it is tried again next time), 2 for input that cannot work.
    """
    from qbench.progress import Display

    screen = terminal()
    job = _job(recipe, checkpoint, data, calibration, limit, dtype, out, device)
    planned = _plan(job)
    cells = planned.select(only)
    slots = gpu_slots(gpus, workers, job.device)[: len(cells)]
    with Display(screen, len(cells)) as display:
        _announce(planned, display)
        records = run_cells(planned, job, display, cells=cells, slots=slots, force=force)
    _show_tables(job.out)
    broken = [record for record in records if record.status == "failed"]
    for record in broken:
        _complain(f"{record.cell}: failed: {record.error}")
    if broken:
        raise typer.Exit(1)


@app.command("plan")
def plan_command(
    recipe: RecipeFile,
    checkpoint: Checkpoints = [],  # noqa: B006
    data: Data = None,
    calibration: Calibration = None,
    limit: Limit = None,
    dtype: DtypeOption = None,
    only: Only = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Show what `qbench run` would do, and what is there already. Runs nothing."""
    from qbench.store import Store

    job = _job(recipe, checkpoint, data, calibration, limit, dtype, out, device)
    planned, store = _plan(job), Store(job.out)
    for task in planned.tasks:
        scored = min(task.documents, planned.recipe.evaluation.limit or task.documents)
        typer.echo(f"task  {task.label}: {scored} of {task.documents} documents")
    if planned.calibration is not None:
        text = planned.calibration
        typer.echo(f"calibration  {text.samples} × {text.length} tokens of {text.path}")
    for cell in planned.select(only):
        record = store.get(cell.place)
        state = "to run" if record is None else {"ok": "there", "failed": "to retry"}[record.status]
        typer.echo(f"{state:9} {cell.name}  key {cell.key[:16]}")
    typer.echo(f"results go to {store.directory}")


@app.command("list")
def list_command(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
) -> None:
    """List the quantizers, the normalizers, or lm-eval's tasks."""
    for line in _listing(what):
        typer.echo(line)


@app.command("tables")
def tables_command(
    folder: Folder,
) -> None:
    """Write and show the delta tables of a results folder."""
    _show_tables(folder)


def _announce(planned, display) -> None:
    """What this run computes on and reads: nothing is chosen in silence."""
    cells = planned.cells
    display.say(f"{len(cells)} cells on {planned.device}, attention {cells[0].attention}")
    if planned.calibration is not None:
        display.say(f"calibration text: {planned.calibration.path}")


def _job(recipe, checkpoint, data, calibration, limit, dtype, out, device) -> Job:
    """The options of ``run`` and ``plan``, the recipe read and checked."""
    from qbench.environment import choose_device
    from qbench.recipe import Recipe

    named = _named(checkpoint)
    loaded = Recipe.load(
        recipe,
        checkpoints=named,
        data=data,
        calibration=calibration,
        limit=limit,
        dtype=dtype,
    )
    return Job(
        recipe=recipe,
        checkpoints=tuple(named.items()),
        data=data,
        calibration=calibration,
        limit=limit,
        dtype=dtype,
        out=out or Path("results") / loaded.name,
        device=choose_device(device),
    )


def _plan(job: Job):
    from qbench.quiet import redirected

    with redirected(job.out / "plan.log"):
        return job.plan()


def _named(pairs: list[str]) -> dict[str, str]:
    """``NAME=SOURCE`` pairs as a dictionary; RecipeError for a malformed or repeated one."""
    named: dict[str, str] = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not (name and separator and source):
            raise RecipeError(f"--checkpoint {pair}: write NAME=PATH_OR_HUB_ID")
        if name in named:
            raise RecipeError(f"--checkpoint {pair}: {name} is given twice")
        named[name] = source
    return named


def _listing(what: Listing) -> list[str]:
    if what is Listing.quantizers:
        from qbench.quantizers import QUANTIZERS
        from qbench.quantizers.names import options

        lines = []
        for name in QUANTIZERS:
            quantizer = QUANTIZERS.get(name)
            lines.append(f"{name:10} {quantizer.description}")
            stated = ", ".join(f"{k}={v.default}" for k, v in options(quantizer.kind).items())
            if stated:
                lines.append(f"{'':10}   options: {stated}")
        return lines
    if what is Listing.normalizers:
        from qbench.attention.normalizers import NORMALIZERS

        return [f"{name:10} {NORMALIZERS.get(name).description}" for name in NORMALIZERS]
    from qbench.evaluation.tasks import task_names

    return task_names()


def _show_tables(directory: Path) -> None:
    from qbench.store import Store
    from qbench.tables import write_tables

    paths = write_tables(Store(directory))
    typer.echo(paths[0].read_text(), nl=False)
    typer.echo("\nwritten: " + ", ".join(str(path) for path in paths), err=True)


def _complain(line: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        line, style="bold red", markup=False
    )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point: one line and exit code 2 for what a user can put right."""
    try:
        app(standalone_mode=True)
    except QbenchError as error:
        for line in str(error).splitlines():
            _complain(line)
        sys.exit(2)
    except KeyboardInterrupt:
        _complain("stopped; finished cells are kept, run the same command to go on")
        sys.exit(130)
