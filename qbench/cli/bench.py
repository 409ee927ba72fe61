"""Measure speeds (``qbench bench``), after checking that results are right."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from qbench.cli.app import show_written
from qbench.cli.options import CommandGroup, DeviceOption, Folder, Json, Only, RecipeFile
from qbench.cli.run import load_launcher
from qbench.files import cache_folder, write_page
from qbench.machine import choose_device, redirected, terminal
from qbench.plan import plan, select
from qbench.recipe import Overrides, save
from qbench.store import Store

SHAPES = Literal["135m", "340m", "7b", "tiny"]
Shape = Annotated[SHAPES, typer.Option(help="Size of the random model.")]
NOWHERE = Path(os.devnull)  # for libraries' notes; errors are raised

bench = CommandGroup("Measure speeds, in one run on one machine, after checking results.")


def load(name: str) -> Any:
    """Import qbench's module ``name``, which imports torch, and return it; what libraries print is
    hidden."""
    with redirected(NOWHERE):
        return importlib.import_module(f"qbench.{name}")


@contextmanager
def quiet() -> Iterator[Callable[[str], None]]:
    """Hide what libraries print; yield a function that prints a line to the terminal."""
    with terminal() as screen, redirected(NOWHERE):
        yield lambda line: print(line, file=screen)


@bench.register
def attention(
    out: Json = None,
    quick: bool = False,
    only: list[str] = [],  # noqa: B006
) -> None:
    """Check the kernels, and time them beside cuDNN, FlashAttention 2 and FlexAttention (GPU).

    Examples:
    qbench bench attention --quick

    Options:
    quick: One shape, few repeats.
    only: A normalizer to check and time, beside the peers; repeat it.
    """
    bench = load("bench.attention_speed")
    results = bench.bench_attention(out, quick, only, log=lambda line: typer.echo(line, err=True))
    show(bench.table(results), results, out)


@bench.register
def generation(
    shape: Shape = "340m",
    prompts: Annotated[int, typer.Option(min=1)] = 500,
    prompt: Annotated[int, typer.Option(min=1)] = 1000,
    tokens: Annotated[int, typer.Option(min=1)] = 256,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    normalizer: list[str] = [],  # noqa: B006
    device: DeviceOption = "auto",
    out: Json = None,
) -> None:
    """Time generated answers, and reading them, beside lm-eval's HFLM, with random weights.

    Examples:
    qbench bench generation

    Options:
    prompts: Prompts to answer.
    prompt: Tokens of each.
    tokens: New tokens of each answer.
    batch_size: Prompts of HFLM's batches.
    normalizer: Time a model with this attention function. Repeatable. Default: softmax and
        softpick.
    """
    bench = load("bench.generation")
    with quiet() as log:
        results = bench.bench_generation(
            shape=shape, device=choose_device(device), prompts=prompts, length=prompt,
            tokens=tokens, batch_size=batch_size,
            normalizers=normalizer or ("softmax", "softpick"), log=log,
        )  # fmt: skip
    show(bench.table(results), results, out)


@bench.register
def evaluation(
    *,
    recipe: RecipeFile,
    overrides: Annotated[Overrides, "checkpoints", "data", "limit", "dtype"],
    device: DeviceOption = "auto",
    out: Json = None,
) -> None:
    """Time the first checkpoint, unquantized, by lm-eval's HFLM, exact and fast scoring.

    Fast scoring is also timed while damage is measured. The softmax is in float32 in every mode;
    --checkpoint names another checkpoint.

    Examples:
    qbench bench evaluation recipes/demo.yaml --limit 50
    """
    bench = load("bench.evaluation_speed")
    launcher = load_launcher(recipe, overrides, out=None, device=device)
    planned = plan(launcher.recipe, device=launcher.device)
    with quiet() as log:
        results = bench.bench_evaluation(planned, log=log)
    show(bench.table(results), results, out)


@bench.register
def command(
    *,
    recipe: RecipeFile,
    overrides: Annotated[Overrides, "checkpoints", "data", "calibration", "limit", "dtype"],
    cell: list[str] = [],  # noqa: B006  typer copies it
    device: DeviceOption = "auto",
    out: Json = None,
) -> None:
    """Time complete commands beside lm-eval's for one model, from the command to its table.

    Examples:
    qbench bench command recipes/demo.yaml --cell 'softmax/fp32' --cell 'softmax/rtn-4bit'

    Options:
    cell: Repeatable: cells to run by name or pattern, one command each. Default: all in one.
    """
    launcher = load_launcher(recipe, overrides, out=None, device=device)
    planned = plan(launcher.recipe, device=launcher.device)
    bench = load("bench.command_speed")
    with TemporaryDirectory() as folder, quiet() as log:
        written = Path(folder) / "recipe.yaml"
        save(recipe, overrides, written)
        results = bench.bench_command(planned, written, cell, log=log)
    show(bench.table(results), results, out)


@bench.register
def cells(
    folder: Folder,
    only: Only = None,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of the answer.")] = 64,
    device: DeviceOption = "auto",
    out: Json = None,
) -> None:
    """Time transformers' generate with the models of finished cells that this machine ran.

    Examples:
    qbench bench cells results/methods --only 'smollm2/*'
    """
    bench, store = load("bench.cells"), Store(folder)
    good = {record.cell: record for record in store.records() if record.status == "ok"}
    records = [good[name] for name in select(good, only)]
    with quiet() as log:
        results = bench.bench_cells(store, records, cache_folder(), device=choose_device(device),
                                    tokens=tokens, log=log, out=out)  # fmt: skip
    show(bench.table(results), results, out)


def show(table: str, results: object, out: Path | None) -> None:
    """Print the table; write it and the results to ``out`` if that is given."""
    typer.echo(table)
    if out is not None:
        show_written(write_page(out, results, table))
