"""``qbench bench``: speeds, measured only where results are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qbench.commands.options import (
    Checkpoints,
    Data,
    Device,
    DeviceOption,
    DtypeOption,
    Limit,
    RecipeFile,
    to_file,
)
from qbench.commands.running import make_job, named
from qbench.commands.screen import show_written
from qbench.errors import RecipeError
from qbench.files import require_folder, write_atomically
from qbench.machine.quiet import redirected, terminal
from qbench.overrides import Overrides

app = typer.Typer(
    no_args_is_help=True, help="Measure speeds, in one run on one machine, after checking results."
)
Json = Annotated[Path | None, to_file("Also write JSON here, and the table beside it.")]


@app.command("attention")
def attention(
    out: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="One shape, few repeats.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="A softpick checkpoint: measure skipping on its activations too."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Plain text to run --checkpoint over.")] = None,
) -> None:
    """The softpick kernels against float64, then against what else runs. Needs a GPU."""
    from qbench.bench.attention import bench_attention, table

    if (checkpoint is None) != (text is None):
        raise RecipeError("bench attention: --checkpoint and --text go together")
    if text is not None and not text.is_file():
        raise RecipeError(f"--text {text}: no such file")
    typer.echo(table(bench_attention(out, "cuda", quick, checkpoint, text)))


@app.command("evaluation")
def evaluation(
    recipe: RecipeFile,
    checkpoint: Checkpoints = [],  # noqa: B006
    data: Data = None,
    limit: Limit = None,
    dtype: DtypeOption = None,
    device: DeviceOption = Device.auto,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Requests of a batch. Default: the recipe's.")
    ] = None,
    out: Json = None,
) -> None:
    """One unquantized checkpoint through lm-eval's HFLM, exact and fast scoring."""
    from qbench.bench.evaluation import MODES, compare, table
    from qbench.evaluation.settings import resolve
    from qbench.evaluation.tasks import load_task
    from qbench.run import load

    overrides = Overrides(checkpoints=named(checkpoint), data=data, limit=limit, dtype=dtype)
    job = make_job(recipe, overrides, out=None, device=device)
    require_folder(job.out)
    planned = job.plan()
    cell = planned.cells[0]
    asked = planned.recipe.evaluation
    if batch_size is not None:
        asked = asked.model_copy(update={"batch_size": batch_size})
    with terminal() as screen, redirected(job.out / "bench.log"):
        model, tokenizer = load(cell, planned)
        found = compare(
            model,
            tokenizer,
            [load_task(task) for task in planned.tasks],
            {
                mode: resolve(
                    asked.model_copy(update={"scoring": mode, "softmax_dtype": "float32"}),
                    device=planned.device,
                    config=cell.checkpoint.config,
                    max_length=cell.checkpoint.max_length,
                    mixes_batches=False,
                )
                for mode in MODES
            },
            say=lambda line: print(line, file=screen),
        )
    typer.echo(table(found))
    if out is not None:
        write_atomically(out, (json.dumps(found.to_json(), indent=1) + "\n").encode())
        if out.suffix:  # /dev/stdout has nothing beside it
            write_atomically(out.with_suffix(".md"), (table(found) + "\n").encode())
        show_written([out, out.with_suffix(".md")])
