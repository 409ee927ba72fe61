"""Show cells and folders, explain keys, export results (``qbench show``, ``explain``,
``export``)."""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from tabulate import tabulate

from qbench import export as formats
from qbench.cli.options import NewFolder, Run, open_store
from qbench.comparison.changes import cell_flips
from qbench.comparison.rows import find_cell, flat, status_of, text
from qbench.errors import ResultsError
from qbench.files import cache_folder, require_folder
from qbench.machine import redirected
from qbench.metrics import is_percentage
from qbench.records import (
    KEY_DIGITS,
    Audit,
    Damage,
    Flips,
    Record,
    RunManifest,
    TaskDamage,
    Unavailable,
    read_record,
)
from qbench.store import Store, run_id, runs
from qbench.text import NO_VALUE, metric_title, number, significant


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


# --- a folder with its runs and cells, or one cell, as text


WIDTH = 100  # characters per line; what is longer goes on below its column
PER_LAYER = {"modules", "left_out", "activations", "kv_cache"}  # of an audit, not shown


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """Return names and values in two columns."""
    rows = list(items)
    width = max((len(name) for name, _ in rows), default=0)
    room = max(20, WIDTH - width - 4)
    lines: list[str] = []
    for name, value in rows:
        for index, part in enumerate(textwrap.wrap(value, room, break_on_hyphens=False) or [""]):
            lines.append(f"  {'' if index else name:{width}}  {part}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an indented table; an empty text if it has no rows."""
    if not rows:
        return ""
    text = tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def cell_text(record: Record, flips: Mapping[str, Mapping[str, Flips]]) -> str:
    """Return what a record says of its cell as a whole: scores, damage, costs, audit, key."""
    rows = [
        (stage.name, f"{stage.seconds:.1f} s", f"{stage.peak_memory_gib:.2f} GiB", stage.detail)
        for stage in record.stages
    ]
    values = {
        "cell": record.cell,
        "status": record.status,
        "error": record.error or "",
        "method": f"{record.title}, {record.precision.name}",
        "attention": record.attention,
        "model": record.source or "",
        "data": ", ".join(
            filter(None, (record.data, f"limit {record.limit}" if record.limit else ""))
        ),
        "begun": f"{record.started:%Y-%m-%d %H:%M:%S %Z}",
        "took": took(record),
    }
    parts: list[tuple[str, str]] = [
        ("", pairs((name, value) for name, value in values.items() if value)),
        ("Scores", _scores(record)),
        ("Tasks that could not be scored", pairs(record.failed_tasks.items())),
        ("Damage, against the unquantized cell", _damage(record.damage, flips)),
        ("Stages", table(("stage", "took", "memory", ""), rows)),
        ("Audit", _audit(record.audit)),
        ("Environment", _values(record.environment.model_dump(exclude_none=True, mode="json"))),
        (f"Key {record.key}, of", pairs(flat(record.key_parts))),
    ]
    return "\n\n".join(f"{title}\n{text}" if title else text for title, text in parts if text)


def took(record: Record) -> str:
    """Return the time from a cell's start to its end, with what lies between its stages."""
    return f"{(record.finished - record.started).total_seconds():.1f} s"


def _scores(record: Record) -> str:
    rows = []
    for score in (*record.scores, *record.groups):
        percent = is_percentage(score.metric)
        stderr = NO_VALUE if score.stderr is None else number(score.stderr, percent=percent)
        value = number(score.value, percent=percent)
        rows.append((score.label, metric_title(score.metric), value, stderr, score.documents))
    return table(("task", "metric", "value", "± SE", "documents"), rows)


def _damage(damage: Damage | Unavailable | None, flips: Mapping[str, Mapping[str, Flips]]) -> str:
    if damage is None:
        return ""
    reason = ""
    if isinstance(damage, Unavailable):
        reason = f"  KL divergence is not available: {damage.reason}\n"
        damage = Damage(tasks={task: TaskDamage() for task in flips})
        if not flips:
            return reason.rstrip()
    rows = []
    for task, measured in damage.tasks.items():
        kl = [NO_VALUE] * 3
        if (spread := measured.distributions) is not None:
            kl = [significant(spread.kl.mean), significant(spread.kl.p99)]
            kl.append(f"{spread.top1_agreement:.2%}")
        changed = ", ".join(
            f"{metric}: {counts.right_to_wrong} / {counts.wrong_to_right}"
            for metric, counts in (flips.get(task) or measured.flips).items()
        )
        rows.append((task, *kl, changed))
    head = ("task", "mean KL", "KL p99", "same top token", "right to wrong / wrong to right")
    return reason + table(head, rows) + _by_confidence(damage)


def _by_confidence(damage: Damage) -> str:
    """Return mean KL and numbers of tokens by the probability that the unquantized model gives its
    likeliest token."""
    bins = {
        task: task_damage.distributions.by_confidence
        for task, task_damage in damage.tasks.items()
        if task_damage.distributions and task_damage.distributions.by_confidence
    }
    if not bins:
        return ""
    rows = [
        (task, *(NO_VALUE if b.kl is None else f"{significant(b.kl)} ({b.tokens})" for b in each))
        for task, each in bins.items()
    ]
    head = ("task", *(f"{level.low:g} to {level.high:g}" for level in next(iter(bins.values()))))
    return "\n\nmean KL (tokens) by the unquantized model's confidence\n\n" + table(head, rows)


def _audit(audit: Audit | None) -> str:
    """Return what was measured of the cell as a whole."""
    if audit is None:
        return ""
    return _values(audit.model_dump(exclude_none=True, mode="json", exclude=PER_LAYER))


def _values(values: Mapping[str, Any]) -> str:
    """Return those of ``values`` that are not empty, floats in four digits."""
    shown = {name: _plain(entry) for name, entry in values.items() if entry not in ([], {}, "")}
    return pairs(flat(shown))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, bool):
        return "yes" if value else "no"
    return significant(value) if isinstance(value, float) else value


def folder_text(store: Store) -> str:
    """Return the runs that a results folder holds, and the cells of the run that is shown."""
    manifest = store.manifest()
    shown = run_id(manifest)
    rows = []
    for name, path in runs(store.directory):
        earlier = read_record(path, RunManifest)
        limit = "all documents" if earlier.limit is None else f"{earlier.limit} documents per task"
        made = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        mark = "*" if name == shown else ""
        rows.append((mark, name, made, len(earlier.cells), ", ".join(earlier.tasks), limit))
    text = [f"{store.directory}: {manifest.name}"]
    if rows:
        text += ["", table(("", "run", "begun or unpacked", "cells", "tasks", "documents"), rows)]
    cells = []
    for cell in manifest.cells:
        record = store.get(cell)
        status, reason = status_of(record)
        spent = took(record) if record else NO_VALUE
        reason = reason or ", ".join(f"{task} failed" for task in record.failed_tasks)
        cells.append((cell.cell, status, cell.precision.name, cell.key[:KEY_DIGITS], spent, reason))
    text += ["", table(("cell", "status", "precision", "key", "took", ""), cells)]
    return "\n".join(text)
