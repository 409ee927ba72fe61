"""``qbench analyze``: why a model suffers from quantization."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.commands.job import make_job, named
from qbench.commands.options import (
    Calibration,
    Checkpoints,
    Data,
    Device,
    DeviceOption,
    DtypeOption,
    Out,
    RecipeFile,
)
from qbench.commands.screen import complain, show_written
from qbench.errors import RecipeError
from qbench.files import require_folder
from qbench.machine.quiet import terminal
from qbench.overrides import Overrides

if TYPE_CHECKING:
    from qbench.analysis.settings import AnalysisSettings
    from qbench.plan import Plan


def analyze(
    recipe: RecipeFile,
    checkpoint: Checkpoints = [],  # noqa: B006  typer copies it
    data: Data = None,
    calibration: Calibration = None,
    dtype: DtypeOption = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON Lines file to read. Default: the documents of the recipe's first task that "
            "scores whole texts, such as wikitext.",
        ),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field of --text that holds the text. Default: text.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Read the first N texts that are long enough.")
    ] = 16,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of each text, from its beginning. Default: 512, or the shortest context "
            "of the checkpoints.",
        ),
    ] = None,
    bos: Annotated[bool, typer.Option(help="Begin each text with BOS, which counts.")] = True,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Cells like this glob, quantized ones too. Default: the unquantized ones.",
        ),
    ] = None,
    out: Out = None,
    device: DeviceOption = Device.auto,
    force: Annotated[
        bool, typer.Option("--force", help="Analyze cells again that have a good record.")
    ] = False,
) -> None:
    """Measure attention sinks, outliers, sparsity and inputs of linear layers on a text.

    One pass a cell. Records, tables and CSV files go to the folder `analysis` of the results
    folder; where `qbench run` wrote records there, tables show the damage beside. Finished cells
    are reused. Exit code 1 where a cell failed, 2 for input that cannot work.
    """
    from qbench.analyses import Analyses
    from qbench.analysis.plan import analysis_grid, chosen, plan_analyses
    from qbench.analysis.run import analyze_if_needed
    from qbench.running.progress import Display
    from qbench.store import Store
    from qbench.tables.analyses import write_analyses

    if field is not None and text is None:
        raise RecipeError("--field: is that of --text, which is not given")
    if text is not None and not text.is_file():
        raise RecipeError(f"--text {text}: no such file; name one of JSON Lines")
    overrides = Overrides(
        checkpoints=named(checkpoint), data=data, calibration=calibration, dtype=dtype
    )
    job = make_job(recipe, overrides, out=out, device=device)
    require_folder(job.out, "--out")
    planned = job.plan()
    wanted = chosen(planned, only)
    settings = _settings(planned, text, field, samples, length, bos)
    cells = plan_analyses(planned, settings)
    analyses = Analyses(job.out)
    others = analyses.put_grid(analysis_grid(planned, cells))
    names = {cell.name for cell in wanted}
    todo = [cell for cell in cells if cell.name in names]
    with terminal() as screen, Display(screen, len(todo)) as display:
        display.say(
            f"{len(todo)} cells on {planned.device}: at most {samples} texts of "
            f"{settings.length} tokens of {settings.source.name}"
        )
        if others:
            display.say(
                f"{analyses.folder} held analyses of other texts, settings or versions; their "
                "records stay, its tables now show this one's (say --out to keep both)"
            )
        found = [analyze_if_needed(cell, planned, analyses, display, force=force) for cell in todo]
    paths = write_analyses(Store(job.out))
    typer.echo(paths[0].read_text())
    show_written(paths)
    broken = [one for one in found if one.status == "failed"]
    for one in broken:
        complain(f"{one.cell}: failed: {one.error}")
    if broken:
        raise typer.Exit(1)


def _settings(
    planned: Plan,
    text: Path | None,
    field: str | None,
    samples: int,
    length: int | None,
    bos: bool,
) -> AnalysisSettings:
    from qbench.analysis.settings import (
        FIELD,
        AnalysisSettings,
        settle_length,
        task_text,
        text_file,
    )

    contexts = {cell.checkpoint_name: cell.checkpoint.max_length for cell in planned.cells}
    return AnalysisSettings(
        source=text_file(text, field or FIELD) if text else task_text(planned.tasks),
        samples=samples,
        length=settle_length(length, contexts),
        bos=bos,
    )
