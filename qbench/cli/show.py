"""Show a cell, explain keys, export results (``qbench show``, ``explain``, ``export``)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from tabulate import tabulate

from qbench.cli.options import NewFolder
from qbench.comparison.rows import explanation, find_cell, status_of
from qbench.errors import ResultsError
from qbench.files import cache_folder, require_folder
from qbench.machine import redirected
from qbench.records import Damage, Record
from qbench.store import Store
from qbench.text import significant


def explain(
    a: Annotated[str, typer.Argument(metavar="A")], b: Annotated[str, typer.Argument(metavar="B")]
) -> None:
    """Print which parts of their keys make two cells different.

    Examples:
    qbench explain results/a/softpick/gptq-4bit results/b/softpick/gptq-4bit

    Options:
    a: DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.
    b: The other cell.
    """
    typer.echo(explanation(find_cell(a)[1], find_cell(b)[1]))


def show(cell: Annotated[str, typer.Argument(metavar="CELL")]) -> None:
    """Show what the record of one cell says: scores, damage, costs, audit, environment, key.

    Documents, layers and tokens are in `qbench view`; `qbench tables` shows a whole folder.

    Examples:
    qbench show results/demo/softpick/gptq-4bit

    Options:
    cell: DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.
    """
    typer.echo(cell_text(find_cell(cell)[1]))


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    to: Annotated[
        Literal["lm-eval", "model-card", "archive"] | None, typer.Option(metavar="FORMAT")
    ] = None,
    model: NewFolder = None,
    weights: Annotated[
        Literal["gptq", "compressed-tensors", "bitsandbytes", "hqq"] | None,
        typer.Option(metavar="FORMAT"),
    ] = None,
    out: NewFolder = None,
) -> None:
    """Write lm-eval's results and samples of each cell, or a model card with the evaluation
    metadata that the Hub shows. Or all of a folder as one file to commit, records.tar.xz, which
    every command reads. Or with --model the quantized model of one cell, as a folder that other
    libraries load.

    Failed and missing cells are left out, and named on standard error; an archive has all.

    Examples:
    qbench export results/demo --to lm-eval
    qbench export results/demo --to archive
    qbench export results/demo/softmax/gptq-4bit --model DIR

    Options:
    folder: A results folder; with --model one cell, FOLDER/CHECKPOINT/NAME.
    to: lm-eval, model-card or archive.
    model: The folder to write: weights, config.json, tokenizer, a model card.
    weights: Format of --model: gptq (default) or compressed-tensors for GPTQ and rounding to
        nearest, the other way round for mixes of them. Other methods have one.
    out: Where to write it. Default: FOLDER/export/FORMAT; for archive FOLDER.
    """
    if (to is None) == (model is None):
        raise ResultsError("export: give either --to FORMAT, or --model DIR for one cell's model")
    if model is not None:
        require_folder(model, "--model")
        if model.is_dir() and any(model.iterdir()):
            raise ResultsError(f"--model {model}: exists already; name a new folder, or remove it")
        store, record = find_cell(str(folder))
        if record.status != "ok":
            raise ResultsError(
                f"{record.cell}: this cell failed, so there is no model to export; run it again"
            )
        with redirected(Path(os.devnull)):
            module = importlib.import_module("qbench.export_model")
            line = module.export_model(store, record, model, cache_folder(), weights)
        typer.echo(f"{line}; written: {model}", err=True)
        return
    store = Store(folder)
    place = out or (folder if to == "archive" else folder / "export" / to)
    require_folder(place, "--out")
    for cell in store.manifest().cells:
        status, reason = status_of(store.get(cell))
        if status != "ok" and to != "archive":
            typer.echo(f"{cell.cell}: {status}: {reason}; left out", err=True)
    paths = importlib.import_module("qbench.export").export(store, to, place)  # scipy, pandas
    typer.echo(f"written: {len(paths)} files or folders below {place}", err=True)


LEFT_OUT: dict[str, Any] = {  # parts of a record that `qbench view` shows, or that name files
    "audit": {"modules", "left_out", "activations", "kv_cache"},
    "scoring": {"difference_from_exact": {"samples"}},
    "files": True,
    "training": True,
    "schema_version": True,
}


def cell_text(record: Record) -> str:
    """Return the fields of a record as YAML, floats with four digits, and its scores, stages and
    damage as tables below."""
    fields = record.model_dump(
        mode="json", exclude_none=True, exclude_defaults=True, exclude=LEFT_OUT
    )
    fields["took_seconds"] = (record.finished - record.started).total_seconds()
    last = {name: fields.pop(name) for name in ("environment", "key_parts")}
    fields = rounded(fields)
    tables = {name: fields.pop(name, []) for name in ("scores", "groups", "stages")}
    if isinstance(record.damage, Damage):
        del fields["damage"]
        tables["damage"] = [
            {"task": task, "mean KL": significant(spread.kl.mean),
             "KL p99": significant(spread.kl.p99),
             "same top token": significant(spread.top1_agreement)}
            for task, measured in record.damage.tasks.items()
            if (spread := measured.distributions) is not None
        ]  # fmt: skip
    parts = [
        f"{name}:\n{tabulate(rows, headers='keys', tablefmt='plain', disable_numparse=True)}\n"
        for name, rows in tables.items()
        if rows
    ]
    as_yaml = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join([as_yaml(fields), *parts, as_yaml(last)])


def rounded(value: Any) -> Any:
    """Return ``value`` with all floats in it, at any depth, rounded to four significant digits."""
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
