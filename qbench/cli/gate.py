"""``qbench check`` and ``qbench baseline``: results held to others, as in CI."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qbench.cli.messages import show_written
from qbench.cli.options import Folder, Run, open_store, to_file
from qbench.files import write_atomically
from qbench.gate.baseline import make
from qbench.gate.check import check as judge
from qbench.gate.margins import parse_margins
from qbench.gate.verdict import as_json, as_junit, as_markdown
from qbench.tables.changes import changes_table


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
            "Default for scores: 1 point and 2 per cent, or the smallest margin that the documents "
            "allow. Repeatable.",
        ),
    ] = [],  # noqa: B006
    across: Annotated[
        list[Across],
        typer.Option(
            metavar="weights|normalizer",
            help="Compare results of other weights, or of another normalizer, with the baseline: "
            "a new checkpoint of the same model. Repeatable.",
        ),
    ] = [],  # noqa: B006
    inconclusive: Annotated[
        Inconclusive, typer.Option(help="Verdict where there are too few documents to tell.")
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

    Without --margin, a score may be 1 point worse, a perplexity 2 per cent. Where the documents are
    too few for that, the margin is wider: a harmless change must pass on all lines 95 times of
    100. Harmless is one that flips 3 per cent of the answers. With 50 lines the margin is 7.2
    points on 200 documents and 1.7 on 2,400.

    Examples:
    ```
    qbench check results/gate --baseline baseline.parquet
    qbench check results/gate --baseline baseline.parquet --margin acc=1 --junit gate.xml
    ```
    """
    verdict = judge(
        open_store(folder, run),
        baseline,
        margins=parse_margins(margin),
        inconclusive=inconclusive.value,
        across=[one.value for one in across],
    )
    for path, text in ((summary, as_markdown), (junit, as_junit), (json, as_json)):
        if path is not None:
            write_atomically(path, text(verdict).encode(errors="replace"))
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
    """Make the baseline that `qbench check` holds later results to.

    Examples:
    ```
    qbench baseline results/gate --out baseline.parquet
    ```
    """
    changes = make(open_store(folder, run), out, replace=replace)
    if changes is not None:
        typer.echo(changes_table(changes), nl=False)
    show_written([out])
