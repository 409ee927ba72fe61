"""Commands that read results: tables, show, export, explain, published, and those that hold
them to others: check, baseline, compare.

None of them imports torch, so they start at once and run on any CI machine.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.options import Folder, Published, Run, show_written, to_file, to_folder
from qbench.errors import OutputError, ResultsError
from qbench.files import require_folder

if TYPE_CHECKING:
    from qbench.records import Record
    from qbench.store import Store


def open_store(folder: Path, run: str | None, option: str = "--run") -> Store:
    """The results of a ``run``, or of the last one; where a folder holds several, standard error
    is told which that is."""
    from qbench.store import Store, run_id, runs

    store = Store(folder, run=run)
    known = [name for name, _ in runs(folder)]
    if store.run is None and len(known) > 1:
        last = run_id(store.grid())
        others = ", ".join(name for name in known if name != last)
        typer.echo(
            f"{folder} holds {len(known)} runs; this is the last one, {last}; {option} takes "
            f"another: {others}",
            err=True,
        )
    return store


class Format(StrEnum):
    md = "md"
    tex = "tex"
    csv = "csv"
    html = "html"


class Target(StrEnum):
    lm_eval = "lm-eval"
    model_card = "model-card"
    tensorboard = "tensorboard"
    wandb = "wandb"


def tables(
    folder: Folder,
    format: Annotated[Format, typer.Option(help="What to print and write.")] = Format.md,
    published: Published = None,
    run: Run = None,
) -> None:
    """Write and show the delta tables of a results folder, in the paper's layout."""

    show_tables(open_store(folder, run), format=format, published=published)


def show_tables(store: Store, *, format: str = "md", published: str | None = None) -> None:
    """Print the tables as ``format`` and write them: tables.md with tables.csv, or
    tables.<format> alone. Those of an earlier run go to a folder of their own; where the folder
    cannot be written to, that is said and they are printed all the same.

    What is printed is what was compared here: another run may write the same files meanwhile.
    """
    from qbench.comparison.compare import compare
    from qbench.tables import write_tables
    from qbench.tables.write import paper, render

    comparison = compare(store)
    formats = ("md", "csv") if format == "md" else (format,)
    paths, problem = [], None
    try:
        require_folder(store.directory)
        paths = write_tables(store, formats=formats, published=published, comparison=comparison)
    except OutputError as error:
        problem = error
    typer.echo(render(comparison, format=format, published=published), nl=False)
    if format == "md" and published:
        typer.echo(paper(store, published), nl=False)
    show_written(paths)
    if problem:
        typer.echo(f"not written: {problem}", err=True)


def explain(
    a: Annotated[
        str, typer.Argument(metavar="A", help="DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other cell.")],
) -> None:
    """Which part of their keys makes two cells different."""
    from qbench.comparison.explain import find_record, text

    typer.echo(text(find_record(a), find_record(b)))


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A results folder, DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.",
        ),
    ],
    document: Annotated[
        int | None,
        typer.Option(min=0, help="What was asked of this document, by its number, and answered."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Of this task only, with --document.")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="With --document: also the text that was asked, made from this recipe."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The recipe's --data, where the run had one.")
    ] = None,
    run: Run = None,
) -> None:
    """Everything about one cell, or which runs and cells a results folder holds."""
    from qbench.comparison.explain import find_cell
    from qbench.show import cell_text, document_text, folder_text
    from qbench.store import Store

    if (Path(what) / "grid.json").is_file():
        typer.echo(folder_text(Store(Path(what), run=run)))
        return
    if not Path(what).is_file() and not (Path(what).parent.parent / "grid.json").is_file():
        raise ResultsError(
            f"{what}: no grid.json here; name a folder that `qbench run` wrote, "
            "DIR/CHECKPOINT/QUANTIZER, or a record's JSON file"
        )
    store, record = find_cell(what, run)
    if recipe is None and data is not None:
        raise ResultsError("--data goes with --recipe, which says what was asked of it")
    if recipe is not None and document is None:
        raise ResultsError("--recipe goes with --document, whose text it gives")
    if document is not None:
        texts = None if recipe is None else _asked(record, recipe, data, document, task)
        typer.echo(document_text(store, record, document, task, texts))
        return
    typer.echo(cell_text(record))


def _asked(
    record: Record, recipe: Path, data: Path | None, document: int, task: str | None
) -> dict[str, tuple[tuple[str, ...], ...]]:
    from qbench.machine import redirected, settle
    from qbench.plan import find_tasks
    from qbench.recipe import Overrides, Recipe

    wanted = Recipe.load(recipe, Overrides(data=data, tasks=None if task is None else (task,)))
    planned, _ = find_tasks(wanted, ())
    settle()
    with redirected(Path(os.devnull)):  # what lm-eval says while it makes requests
        from qbench.evaluation.evaluate import rebuild_requests

        return rebuild_requests(record, planned, document, task)


def export(
    folder: Folder,
    to: Annotated[
        Target,
        typer.Option(metavar="FORMAT", help="lm-eval, model-card, tensorboard or wandb."),
    ],
    out: Annotated[
        Path | None, to_folder("Where to write it. Default: FOLDER/export/FORMAT.")
    ] = None,
    run: Run = None,
) -> None:
    """Write results in others' formats: lm-eval's results and samples, the evaluation metadata of
    a model card, TensorBoard's scalars, Weights & Biases' runs (offline; `wandb sync` sends them).

    Failed and missing cells are left out, and named on standard error.
    """

    from qbench.comparison.lines import judge
    from qbench.export import WRITERS

    store = open_store(folder, run)
    place = out or store.place() / "export" / to.value
    require_folder(place, "--out")
    for cell in store.grid().cells:
        status, reason = judge(store.get(cell))
        if status != "ok":
            typer.echo(f"{cell.cell}: {status}: {reason}; left out", err=True)
    paths = WRITERS[to.value](store, place)
    typer.echo(f"written: {len(paths)} files or folders below {place}", err=True)


def published(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One table; default: a list of all.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Recompute what can be recomputed; flag the rest.")
    ] = False,
) -> None:
    """List or print the papers' tables, or check that they add up."""
    from qbench import published as papers
    from qbench.published.check import summary

    if check:
        typer.echo(summary())
    elif name:
        typer.echo(papers.show(papers.table(name)))
    else:
        for one in papers.tables():
            typer.echo(f"{one.name:22} {one.source}: {one.caption}")
        typer.echo(f"sets for --published: {', '.join(papers.sets())}")


class Inconclusive(StrEnum):
    passes = "pass"
    fails = "fail"


class Across(StrEnum):
    weights = "weights"
    normalizer = "normalizer"


def check(
    folder: Folder,
    baseline: Annotated[Path, typer.Option(metavar="FILE", help="What `qbench baseline` wrote.")],
    margin: Annotated[
        list[str],
        typer.Option(
            metavar="METRIC=NUMBER",
            help="How much worse is tolerable: percentage points for accuracies (acc=1), per cent "
            "for perplexities (perplexity=2) and for what the audit measures (layer_error=10). "
            "Default for scores: 1 point and 2 per cent, or the least that so many documents "
            "support. Repeatable.",
        ),
    ] = [],  # noqa: B006
    across: Annotated[
        list[Across],
        typer.Option(
            metavar="weights|normalizer",
            help="Hold results of other weights, or of another normalizer, to the baseline: a new "
            "checkpoint of the same model. Repeatable.",
        ),
    ] = [],  # noqa: B006
    inconclusive: Annotated[
        Inconclusive, typer.Option(help="What too few documents to tell counts as.")
    ] = Inconclusive.fails,
    summary: Annotated[Path | None, to_file("Also write Markdown here.")] = None,
    junit: Annotated[Path | None, to_file("Also write JUnit XML here.")] = None,
    json: Annotated[Path | None, to_file("Also write JSON here.")] = None,
    run: Run = None,
) -> None:
    """The CI gate: is any score worse than the baseline's by more than a margin?

    Paired non-inferiority per task and precision; the same outcomes on every document pass at any
    margin. Exit code 0: pass, 1: fail, 2: unusable input, such as results of other weights or
    other data. Missing, failed or unaudited cells never pass. What the audit measured of every
    quantized layer is held to the baseline too.

    Without --margin, a score may be 1 point (accuracies) or 2 per cent (perplexities) worse, or as
    much as the baseline's documents can tell: the margin at which a harmless change, one that
    flips 3 per cent of the answers by chance, passes on all lines 95 times of 100. With 50 lines
    that is 7.2 points on 200 documents and 1.7 on 2,400.
    """
    from qbench.gate.check import check as judge
    from qbench.gate.margins import parse_margins
    from qbench.gate.verdict import as_markdown, write_verdict

    verdict = judge(
        open_store(folder, run),
        baseline,
        margins=parse_margins(margin),
        inconclusive=inconclusive.value,
        across=[one.value for one in across],
    )
    write_verdict(verdict, markdown=summary, junit=junit, json=json)
    typer.echo(as_markdown(verdict), nl=False)
    raise typer.Exit(verdict.exit_code)


def baseline(
    folder: Folder,
    out: Annotated[Path, to_file("The file to write.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing baseline, showing old and new.")
    ] = False,
    run: Run = None,
) -> None:
    """Make the baseline that `qbench check` holds later results to."""
    from qbench.gate.baseline import make
    from qbench.tables.changes import changes_table

    changes = make(open_store(folder, run), out, replace=replace)
    if changes is not None:
        typer.echo(changes_table(changes), nl=False)
    show_written([out])


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A results folder.")],
    b: Annotated[
        Path | None,
        typer.Argument(
            metavar="[B]", help="Another, of the same recipe. Default: the last run of A."
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="An earlier run of A.")
    ] = None,
    run_b: Annotated[
        str | None, typer.Option("--run-b", metavar="ID", help="An earlier run of B.")
    ] = None,
) -> None:
    """What changed between two results of one recipe, paired by document.

    Both may be runs of one folder, as `qbench show FOLDER` lists them.
    """
    from qbench.comparison.changes import compare_results
    from qbench.tables.changes import changes_table

    if b is None and run is None:
        raise ResultsError(f"compare {a}: with what? Name another folder, or a run of it by --run")
    old = open_store(a, run)
    new = open_store(b or a, run_b, "--run-b")
    typer.echo(changes_table(compare_results(old, new)), nl=False)
