"""Measure why a model suffers from quantization (``qbench analyze``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from qbench.analysis.analyze_run import (
    FIELD,
    AnalysisSettings,
    analysis_manifest,
    analyze_if_needed,
    choose_cells,
    default_length,
    plan_analyses,
    plan_sensitivities,
    put_sensitivity_manifest,
    task_text,
    text_file,
)
from qbench.cli.app import complain, show_written
from qbench.cli.options import DeviceOption, Out, RecipeFile
from qbench.cli.run import Launcher, load_launcher
from qbench.errors import RecipeError
from qbench.files import require_folder
from qbench.plan import Cell, Plan, plan, require_runnable
from qbench.recipe import Overrides
from qbench.records import Analysis, Sensitivity
from qbench.store import Analyses, Sensitivities, Store
from qbench.text import group_by_reason


def analyze(
    *,
    recipe: RecipeFile,
    overrides: Annotated[Overrides, "checkpoints", "data", "calibration", "dtype"],
    text: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    field: str | None = None,
    samples: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int | None, typer.Option(min=2)] = None,
    bos: bool = True,
    only: Annotated[str | None, typer.Option(metavar="PATTERNS")] = None,
    sensitivity: Annotated[str | None, typer.Option(metavar="QUANTIZER")] = None,
    blocks: bool = False,
    out: Out = None,
    device: DeviceOption = "auto",
    force: bool = False,
) -> None:
    """Measure attention sinks, outliers, sparsity and inputs of linear layers on a text.

    One pass per cell. Records, tables, figures and CSV files go to the folder `analysis` of the
    results folder; if `qbench run` wrote records there, tables show the damage too. Finished
    cells are reused. Exit code 1 if a cell failed, 2 for input that cannot work.

    Examples:
    qbench analyze recipes/demo.yaml
    qbench analyze recipes/gptq.yaml --only "*" --sensitivity gptq-4bit

    Options:
    text: JSON Lines file to read. Default: the documents of the recipe's first task that scores
        whole texts, such as wikitext.
    field: Field of --text that holds the text. Default: text.
    samples: Read the first N texts that have at least --length tokens.
    length: Tokens of each text, from its beginning; more than the checkpoints' context shows where
        they break. Default: 512, or the shortest context of the checkpoints.
    bos: Begin each text with BOS, which counts.
    only: Analyze the cells whose names match one of these patterns, quantized ones too. Default:
        the unquantized ones.
    sensitivity: Also quantize one linear layer at a time with this quantizer of the recipe, and
        measure the divergence.
    blocks: With --sensitivity: one decoder layer at a time.
    force: Analyze cells again that have a finished record.
    """
    from qbench.viewer.figures import write_analyses  # pandas and figures

    if field is not None and text is None:
        raise RecipeError("--field: needs --text FILE.jsonl")
    if text is not None and not text.is_file():
        raise RecipeError(
            f"--text {text}: no such file; name a JSON Lines file with a field {field or FIELD}"
        )
    if blocks and sensitivity is None:
        raise RecipeError("--blocks: needs --sensitivity QUANTIZER")
    if text is not None:  # no task is read, and this one needs no data
        overrides = overrides.model_copy(update={"tasks": ("passkey_256",)})
    # one task's text is read, so that others may lack their data
    overrides = overrides.model_copy(update={"skip_missing": True})
    launcher = load_launcher(recipe, overrides, out=out, device=device)
    require_folder(launcher.out, "--out")
    planned = plan(launcher.recipe, device=launcher.device, gpu=launcher.gpu, show=True)
    settings = AnalysisSettings(
        source=(
            text_file(text, field or FIELD) if text else task_text(planned.tasks, planned.skipped)
        ),
        samples=samples,
        length=length or default_length(cell.checkpoint.max_length for cell in planned.cells),
        bos=bos,
        device=planned.device,
        blocks=blocks,
    )
    cells = choose_cells(planned, only)
    require_runnable(cells)
    units = plan_sensitivities(planned, sensitivity, settings) if sensitivity is not None else ()
    analyzed, analyses = plan_analyses(planned, settings), Analyses(launcher.out)
    grid = analysis_manifest(planned, analyzed)
    before = analyses.put_manifest(grid)
    if before is not None and before.cells != grid.cells:
        complain(
            f"{analyses.directory} held analyses of other texts, settings or versions; their "
            "records stay, but its tables now show this one (--out keeps both)"
        )
    names = {cell.name for cell in cells}
    analyzed = [cell for cell in analyzed if cell.name in names]
    broken = compute_missing(analyses, settings, analyzed, planned, launcher, force=force)
    if sensitivity is not None:
        checkpoints = {cell.checkpoint_name for cell in cells}
        units = [cell for cell in units if cell.checkpoint_name in checkpoints]
        by_layer = Sensitivities(launcher.out)
        put_sensitivity_manifest(by_layer, units, planned.recipe.name)
        broken += compute_missing(by_layer, settings, units, planned, launcher, force=force)
    paths = write_analyses(Store(launcher.out))
    typer.echo(paths[0].read_text())
    show_written(paths)
    for line in group_by_reason((record.cell, f"failed: {record.error}") for record in broken):
        complain(line)
    if broken:
        raise typer.Exit(1)


def compute_missing(
    analyses: Analyses,
    settings: AnalysisSettings,
    cells: Sequence[Cell],
    plan: Plan,
    launcher: Launcher,
    *,
    force: bool,
) -> list[Analysis | Sensitivity]:
    """Compute the analyses of ``cells`` that are missing, or with ``force`` all; return the
    failed."""
    apart = ""
    if analyses.kind is Sensitivity:
        apart = f", one {'decoder' if settings.blocks else 'linear'} layer at a time"
    with launcher.display(len(cells)) as display:
        display.log(
            f"{len(cells)} cell{'s' * (len(cells) != 1)} on {settings.device}: at most "
            f"{settings.samples} texts of {settings.length} tokens of {settings.source.name}{apart}"
        )
        results = [
            analyze_if_needed(
                cell, plan=plan, analyses=analyses, settings=settings, progress=display, force=force
            )
            for cell in cells
        ]
        return [record for record in results if record.status != "ok"]
