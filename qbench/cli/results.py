"""Print tables, and compare with a baseline (``qbench tables``, ``check``, ``baseline``)."""

from __future__ import annotations

import gc
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from qbench.cli.app import show_tables, show_written
from qbench.cli.options import Folder, NewFile
from qbench.errors import OutputError
from qbench.files import write_atomically
from qbench.gate.baseline import make
from qbench.gate.check import check as judge
from qbench.gate.verdict import Inconclusive, as_junit, as_markdown, parse_margins
from qbench.store import Store


def tables(
    folder: Folder,
    format: Literal["md", "tex", "csv"] = "md",
    published: Annotated[str | None, typer.Option(metavar="SET")] = None,
    against: Annotated[str | None, typer.Option(metavar="QUANTIZER")] = None,
) -> None:
    """Write the tables of a results folder and show the answer: a line per precision.

    tables.md has every score with its interval, in the paper's layout; tables.csv all numbers.

    Examples:
    qbench tables results/demo

    Options:
    format: md: print the summary, write tables.md and tables.csv. csv: print and write tables.csv,
        all numbers. tex: print and write tables.tex, tables for LaTeX's input.
    published: Also a paper's scores beside ours: softpick-340m, softpick-1.8b.
    against: Also what each precision loses against this one, by score.
    """
    gc.disable()  # searches took a twentieth of a large folder's time
    show_tables(Store(folder), format=format, published=published, against=against)


class Across(StrEnum):
    """What ``check`` may find changed from the baseline."""

    weights = "weights"
    normalizer = "normalizer"


def check(
    folder: Folder,
    baseline: Annotated[Path, typer.Option(metavar="FILE")],
    margin: Annotated[list[str], typer.Option(metavar="METRIC=NUMBER")] = [],  # noqa: B006
    across: Annotated[list[Across], typer.Option(metavar="weights|normalizer")] = [],  # noqa: B006
    inconclusive: Inconclusive = "fail",
    summary: NewFile = None,
    junit: NewFile = None,
) -> None:
    """The CI gate: is any score worse than the baseline's by more than a margin?

    Paired non-inferiority per task and precision; the same outcomes on every document pass at any
    margin. Exit code 0: pass, 1: fail, 2: unusable input, such as results of other weights or
    other data. Missing, failed or unaudited cells never pass. What the audit measured of every
    quantized layer is compared with the baseline too.

    Without --margin, a score may be 1 point worse, a perplexity 2 per cent. If the documents are
    too few for that, the margin is wider, so that a harmless change passes on all rows in 95 of 100
    runs. A change that flips 3 per cent of the answers counts as harmless. With 50 rows the margin
    is 7.2 points on 200 documents and 1.8 on 2,400.

    Examples:
    qbench check results/gate --baseline baseline.tar.xz
    qbench check results/gate --baseline baseline.tar.xz --margin acc=1 --junit gate.xml

    Options:
    baseline: What `qbench baseline` wrote, or a results folder.
    margin: How much worse is tolerable: percentage points for accuracies (acc=1), per cent for
        perplexities (perplexity=2) and for what the audit measures (layer_error=10). Default for
        scores: 1 point and 2 per cent, or the smallest margin that the documents allow. Repeatable.
    across: Compare results of other weights, or of another normalizer, with the baseline: a new
        checkpoint of the same model. Repeatable.
    inconclusive: Verdict if there are too few documents to tell.
    summary: Write all rows as Markdown here; the terminal shows those that do not pass.
    junit: Also write JUnit XML here.
    """
    named: dict[Path, str] = {}
    for option, path in (("--baseline", baseline), ("--summary", summary), ("--junit", junit)):
        if path is not None and (first := named.setdefault(path.resolve(), option)) != option:
            raise OutputError(f"{option} {path}: {first} names the same file; name another")
    gc.disable()  # searches took a twentieth of a large folder's time
    verdict = judge(
        Store(folder),
        baseline,
        margins=parse_margins(margin),
        inconclusive=inconclusive,
        across=across,
    )
    for path, text in ((summary, as_markdown), (junit, as_junit)):
        if path is not None:
            write_atomically(path, text(verdict).encode(errors="replace"))
    typer.echo(as_markdown(verdict, passed=False), nl=False)
    raise typer.Exit(verdict.exit_code)


def baseline(folder: Folder, out: NewFile, replace: bool = False) -> None:
    """Make the baseline that `qbench check` compares later results with.

    Examples:
    qbench baseline results/gate --out baseline.tar.xz

    Options:
    out: The file to write.
    replace: Replace an existing baseline; `qbench check` shows what changed.
    """
    make(Store(folder), out, replace=replace)
    show_written([out])
