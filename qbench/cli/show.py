"""Show cells and folders, explain keys, export results (``qbench show``, ``explain``,
``export``)."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from qbench import export as formats
from qbench.cli.options import NewFolder, Run, open_store
from qbench.comparison.explain import find_cell, text
from qbench.comparison.flips import cell_flips
from qbench.comparison.rows import status_of
from qbench.errors import ResultsError
from qbench.files import cache_folder, require_folder
from qbench.machine import redirected
from qbench.show import cell_text, folder_text
from qbench.store import Store


def explain(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
) -> None:
    """Print which parts of their keys make two cells different.

    Examples:
    ```
    qbench explain results/a/softpick/gptq-4bit results/b/softpick/gptq-4bit
    ```

    Options:
    a: DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.
    b: The other cell.
    """
    typer.echo(text(find_cell(a)[1], find_cell(b)[1]))


def show(
    what: Annotated[str, typer.Argument(metavar="WHAT")],
    run: Run = None,
) -> None:
    """Show one cell, or which runs and cells a results folder holds.

    Documents, layers and tokens are in `qbench view`.

    Examples:
    ```
    qbench show results/demo
    qbench show results/demo/softpick/gptq-4bit
    ```

    Options:
    what: A results folder, DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.
    """
    if Store(Path(what)).has_manifest():
        typer.echo(folder_text(Store(Path(what), run=run)))
        return
    if not Path(what).is_file() and not Store(Path(what).parent.parent).has_manifest():
        raise ResultsError(
            f"{what}: no grid.json here; name a folder that `qbench run` wrote, "
            "DIR/CHECKPOINT/QUANTIZER, or a record's JSON file"
        )
    store, record = find_cell(what, run)
    typer.echo(cell_text(record, cell_flips(store, record)))


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    to: Annotated[
        Literal["lm-eval", "model-card", "wandb", "archive"] | None, typer.Option(metavar="FORMAT")
    ] = None,
    model: NewFolder = None,
    weights: Annotated[
        Literal["gptq", "compressed-tensors", "bitsandbytes", "hqq"] | None,
        typer.Option(metavar="FORMAT"),
    ] = None,
    out: NewFolder = None,
    run: Run = None,
) -> None:
    """Write results in others' formats: lm-eval's results and samples, the evaluation metadata of
    a model card, Weights & Biases' runs (offline; `wandb sync` sends them).
    Or all of a folder as one file to commit, records.tar.xz, which every command reads.
    Or with --model the quantized model of one cell, as a folder that other libraries load.

    Failed and missing cells are left out, and named on standard error; an archive has all.

    Examples:
    ```
    qbench export results/demo --to lm-eval
    qbench export results/demo --to wandb --out DIR
    qbench export results/demo --to archive
    qbench export results/demo/softmax/gptq-4bit --model DIR
    ```

    Options:
    folder: A results folder; with --model one cell, FOLDER/CHECKPOINT/NAME.
    to: lm-eval, model-card, wandb or archive.
    model: The folder to write: weights, config.json, tokenizer, a model card.
    weights: Of --model: gptq or compressed-tensors for GPTQ and rounding to nearest.
    out: Where to write it. Default: FOLDER/export/FORMAT; for archive FOLDER.
    """
    if (to is None) == (model is None):
        raise ResultsError("write --to FORMAT, or --model DIR for the model of one cell")
    if model is not None:
        require_folder(model, "--model")
        store, record = find_cell(str(folder), run)
        if record.status != "ok":
            raise ResultsError(f"{record.cell}: it failed, so there is no model to export")
        with redirected(Path(os.devnull)):
            module = importlib.import_module("qbench.export_model")
            line = module.export_model(store, record, model, cache_folder(), weights)
        typer.echo(f"{line}; written: {model}", err=True)
        return
    if to == "archive" and run is not None:
        raise ResultsError("--run: an archive has all runs; leave it out")
    store = open_store(folder, run)
    place = out or (folder if to == "archive" else store.output(f"export/{to}"))
    require_folder(place, "--out")
    for cell in store.manifest().cells:
        status, reason = status_of(store.get(cell))
        if status != "ok" and to != "archive":
            typer.echo(f"{cell.cell}: {status}: {reason}; left out", err=True)
    paths = formats.export(store, to, place)
    typer.echo(f"written: {len(paths)} files or folders below {place}", err=True)
