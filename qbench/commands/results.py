"""Commands that read results: tables, report, check, baseline, compare, explain, published.

None of them imports torch, so they start at once and run on any CI machine.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.commands.options import Folder, Published, Run, to_file, to_folder
from qbench.commands.screen import show_written
from qbench.files import require_folder
from qbench.machine.memory import require_memory

if TYPE_CHECKING:
    from qbench.store import Store


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


class Inconclusive(StrEnum):
    passes = "pass"
    fails = "fail"


class Across(StrEnum):
    weights = "weights"
    normalizer = "normalizer"


def tables(
    folder: Folder,
    format: Annotated[Format, typer.Option(help="What to print and write.")] = Format.md,
    published: Published = None,
    run: Run = None,
) -> None:
    """Write and show the delta tables of a results folder, in the paper's layout."""
    from qbench.store import Store

    say_run(folder, run)
    show_tables(Store(folder, run=run), format=format, published=published, run=run)


def say_run(folder: Path, run: str | None) -> None:
    """On standard error, where a folder holds several runs: which of them is shown."""
    from qbench.runs import find_run, run_id, runs
    from qbench.store import Store

    known = [name for name, _ in runs(folder)]
    if run is not None:
        find_run(folder, run)
    elif len(known) > 1:
        last = run_id(Store(folder).grid())
        others = ", ".join(name for name in known if name != last)
        typer.echo(
            f"{folder} holds {len(known)} runs; this is the last one, {last}; --run shows another: "
            f"{others}",
            err=True,
        )


def show_tables(
    store: Store, *, format: str = "md", published: str | None = None, run: str | None = None
) -> None:
    """Write tables.md, tables.csv and tables.<format>; print the latter. Those of an earlier
    ``run`` go to a folder of their own.

    What is printed is what was compared here: another run may write the same files meanwhile.
    """
    require_memory()
    from qbench.comparison.compare import compare
    from qbench.tables import write_tables
    from qbench.tables.write import paper, render

    require_folder(store.directory)
    comparison = compare(store)
    formats = list(dict.fromkeys([format, "md", "csv"]))
    directory = store.directory / "runs" / run if run else None
    paths = write_tables(
        store, directory, formats=formats, published=published, comparison=comparison
    )
    typer.echo(render(comparison, format=format, published=published), nl=False)
    if format == "md" and published:
        typer.echo(paper(store, published), nl=False)
    show_written(paths)


def report(
    folder: Folder,
    out: Annotated[Path | None, to_folder("Where to write it. Default: FOLDER.")] = None,
    figures: Annotated[
        str, typer.Option(metavar="FORMATS", help="Of the figure files: svg, png, pdf, by commas.")
    ] = "svg",
    published: Published = None,
) -> None:
    """Write report.html, one file that opens without a network, and its figures."""
    require_memory()
    from qbench.report import write
    from qbench.store import Store

    require_folder(out or folder)
    wanted = [name.strip() for name in figures.split(",") if name.strip()]
    paths = write(Store(folder), out, figures=wanted, published=published)
    show_written(paths)


def check(
    folder: Folder,
    baseline: Annotated[Path, typer.Option(help="What `qbench baseline` wrote.")],
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
            help="Hold results of other weights, or of another normalizer, to the baseline: a new "
            "checkpoint of the same model. Repeatable."
        ),
    ] = [],  # noqa: B006
    inconclusive: Annotated[
        Inconclusive, typer.Option(help="What too few documents to tell counts as.")
    ] = Inconclusive.fails,
    summary: Annotated[Path | None, to_file("Also write Markdown here.")] = None,
    junit: Annotated[Path | None, to_file("Also write JUnit XML here.")] = None,
    json: Annotated[Path | None, to_file("Also write JSON here.")] = None,
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
    require_memory()
    from qbench.gate.check import check as judge
    from qbench.gate.margins import parse_margins
    from qbench.gate.verdict import as_markdown, write_verdict
    from qbench.store import Store

    verdict = judge(
        Store(folder),
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
) -> None:
    """Make the baseline that `qbench check` holds later results to."""
    require_memory()
    from qbench.gate.baseline import make
    from qbench.store import Store
    from qbench.tables.changes import changes_table

    changes = make(Store(folder), out, replace=replace)
    if changes is not None:
        typer.echo(changes_table(changes), nl=False)
    show_written([out])


def compare(
    a: Annotated[Path, typer.Argument(help="A results folder.")],
    b: Annotated[Path, typer.Argument(help="Another, of the same recipe.")],
) -> None:
    """What changed between two results of one recipe, paired by document."""
    require_memory()
    from qbench.comparison.changes import compare_results
    from qbench.store import Store
    from qbench.tables.changes import changes_table

    typer.echo(changes_table(compare_results(Store(a), Store(b))), nl=False)


def explain(
    a: Annotated[str, typer.Argument(help="DIR/CHECKPOINT/QUANTIZER, or a record's JSON file.")],
    b: Annotated[str, typer.Argument(help="The other cell.")],
) -> None:
    """Which part of their keys makes two cells different."""
    from qbench.comparison.explain import find_record, text

    typer.echo(text(find_record(a), find_record(b)))


def show(
    what: Annotated[
        str,
        typer.Argument(help="A results folder, DIR/CHECKPOINT/QUANTIZER, or a record's JSON file."),
    ],
    document: Annotated[
        int | None,
        typer.Option(min=0, help="What was asked of this document, by its number, and answered."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Of this task only, with --document.")] = None,
    run: Run = None,
) -> None:
    """Everything about one cell, or which runs and cells a results folder holds."""
    from qbench.comparison.explain import find_cell
    from qbench.show import cell_text, document_text, folder_text
    from qbench.store import Store

    if (Path(what) / "grid.json").is_file():
        typer.echo(folder_text(Store(Path(what), run=run)))
        return
    store, record = find_cell(what, run)
    if document is not None:
        typer.echo(document_text(store, record, document, task))
        return
    typer.echo(cell_text(record))


def export(
    folder: Folder,
    to: Annotated[Target, typer.Option(help="Whose format.")],
    out: Annotated[
        Path | None, to_folder("Where to write it. Default: FOLDER/export/FORMAT.")
    ] = None,
    run: Run = None,
) -> None:
    """Write results in others' formats: lm-eval's results and samples, the evaluation metadata of
    a model card, TensorBoard's scalars, Weights & Biases' runs (offline; `wandb sync` sends them).

    Failed and missing cells are left out, and named on standard error.
    """
    from importlib import import_module

    from qbench.comparison.lines import judge
    from qbench.store import Store

    require_memory()
    store = Store(folder, run=run)
    place = out or store.directory / "export" / to.value
    require_folder(place, "--out")
    for cell in store.grid().cells:
        status, reason = judge(store.get(cell))
        if status != "ok":
            typer.echo(f"{cell.cell}: {status}: {reason}; left out", err=True)
    module = import_module(f"qbench.export.{to.value.replace('-', '_')}")
    paths = module.write(store, place)
    typer.echo(f"written: {len(paths)} files or folders below {place}", err=True)


def published(
    name: Annotated[str | None, typer.Argument(help="One table; default: a list of all.")] = None,
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
