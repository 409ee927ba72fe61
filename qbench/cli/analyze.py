"""``qbench analyze``: why a model suffers from quantization."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.analysis_parts import parts_of, run_part
from qbench.cli.job import Place, make_job, named, on_cluster
from qbench.cli.options import (
    Calibration,
    CheckpointsOfRecipe,
    ClusterOption,
    Data,
    Device,
    DeviceOption,
    DtypeOption,
    Out,
    PluginOption,
    RecipeFile,
)
from qbench.cli.screen import complain, show_written
from qbench.errors import RecipeError
from qbench.files import require_folder
from qbench.recipe import Overrides
from qbench.text import together

if TYPE_CHECKING:
    from qbench.analysis.settings import AnalysisSettings
    from qbench.plan import Plan


def analyze(
    recipe: RecipeFile,
    checkpoint: CheckpointsOfRecipe = [],  # noqa: B006  typer copies it
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
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER.HEAD,…",
            help="Heads whose attention maps are kept, from 0. Default: the one that weighs the "
            "first key most, and the one with the sharpest weights.",
        ),
    ] = None,
    long_context: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            help="Also read texts of so many tokens, such as four times the context: losses and "
            "weights along the text.",
        ),
    ] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(
            metavar="QUANTIZER",
            help="Also quantize one linear layer at a time with this quantizer of the recipe, and "
            "measure the divergence.",
        ),
    ] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="With --sensitivity: one decoder layer at a time.")
    ] = False,
    out: Out = None,
    device: DeviceOption = Device.auto,
    plugin: PluginOption = [],  # noqa: B006  typer copies it
    force: Annotated[
        bool, typer.Option("--force", help="Analyze cells again that have a good record.")
    ] = False,
    cluster: ClusterOption = None,
) -> None:
    """Measure attention sinks, outliers, sparsity and inputs of linear layers on a text.

    One pass a cell. Records, tables, figures and CSV files go to the folder `analysis` of the
    results folder; where `qbench run` wrote records there, tables show the damage beside. Finished
    cells are reused. Exit code 1 where a cell failed, 2 for input that cannot work.
    """
    from qbench.plan import cell_names
    from qbench.report.why import write_analyses
    from qbench.store import Store

    if field is not None and text is None:
        raise RecipeError("--field: is that of --text, which is not given")
    if text is not None and not text.is_file():
        raise RecipeError(f"--text {text}: no such file; name one of JSON Lines")
    if blocks and sensitivity is None:
        raise RecipeError("--blocks: is of --sensitivity QUANTIZER, which is not given")
    overrides = Overrides(
        checkpoints=named(checkpoint), data=data, calibration=calibration, dtype=dtype
    )
    job = make_job(recipe, overrides, out=out, device="cpu" if cluster else device)
    require_folder(job.out, "--out")
    with contextlib.ExitStack() as stack:
        place = Place(job=job, executor=None)
        if cluster is not None:
            most = len(cell_names(job.recipe))
            place = stack.enter_context(on_cluster(job, device, cluster, cells=most))
        planned = place.job.plan(show=True)
        settings = _settings(planned, text, field, samples, length, bos, heads)
        folder = job.out.resolve() if cluster else job.out
        work = parts_of(planned, settings, folder, only, long_context, sensitivity, blocks=blocks)
        broken = [one for part in work for one in run_part(part, settings, place, force=force)]
    paths = write_analyses(Store(job.out))
    typer.echo(paths[0].read_text())
    show_written(paths)
    for line in together(f"{one.cell}: failed: {one.error}" for one in broken):
        complain(line)
    if broken:
        raise typer.Exit(1)


def _settings(
    planned: Plan,
    text: Path | None,
    field: str | None,
    samples: int,
    length: int | None,
    bos: bool,
    heads: str | None,
) -> AnalysisSettings:
    from qbench.analysis.settings import (
        FIELD,
        AnalysisSettings,
        parse_heads,
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
        device=planned.device,
        heads=None if heads is None else parse_heads(heads),
    )
