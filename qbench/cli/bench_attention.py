"""``qbench bench attention``: the kernels against float64, then against what else runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from qbench.cli.options import Json
from qbench.errors import RecipeError


def attention(
    out: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="One shape, few repeats.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="A softpick checkpoint: measure skipping on its activations too."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Plain text to run --checkpoint over.")] = None,
    only: Annotated[
        list[str],
        typer.Option(help="A normalizer to check and time, beside its plain kernel; repeat it."),
    ] = [],  # noqa: B006
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile and check before anything is timed. Default: one for each "
            "core but one, at most 16.",
            min=1,
        ),
    ] = None,
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Try other tiles and arithmetic instead, and rank them.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="Leave out of --tiles what is not compiled after so long.", min=0),
    ] = None,
) -> None:
    """The kernels against float64, then against what else runs. Needs a GPU.

    Checks run in processes side by side, which also compile what is timed. Timing follows alone.
    """
    from qbench.bench.attention import bench_attention, table

    if tiles:
        if checkpoint or text or jobs:
            raise RecipeError(
                "bench attention --tiles: it takes --quick, --only, --seconds and --out alone"
            )
        _tiles(out, quick, only, seconds)
        return
    if seconds is not None:
        raise RecipeError("bench attention --seconds: it is for --tiles")
    if (checkpoint is None) != (text is None):
        raise RecipeError("bench attention: --checkpoint and --text go together")
    if text is not None and not text.is_file():
        raise RecipeError(f"--text {text}: no such file")
    typer.echo(table(bench_attention(out, "cuda", quick, checkpoint, text, only, jobs)))


def _tiles(out: Path | None, quick: bool, only: list[str], seconds: float | None) -> None:
    """``--quick``: heads of 64 alone."""
    from qbench.bench.attention import require_gpu
    from qbench.bench.attention_tiles import COMPILE_S, bench_tiles
    from qbench.bench.attention_tiles_table import tiles_table
    from qbench.bench.kept import kept_in

    require_gpu()
    widths = (64,) if quick else (64, 128)
    keep = kept_in(out, partial(tiles_table, best=99))
    typer.echo(tiles_table(bench_tiles(widths, only, seconds or COMPILE_S, keep)))
