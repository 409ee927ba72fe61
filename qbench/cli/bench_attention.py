"""``qbench bench attention``: the kernels against float64, then against what else runs."""

from __future__ import annotations

from typing import Annotated

import typer

from qbench.cli.options import Json


def attention(
    out: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="One shape, few repeats.")] = False,
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
) -> None:
    """The kernels against float64, then against what else runs. Needs a GPU.

    Checks run in processes side by side, which also compile what is timed. Timing follows alone.
    """
    from qbench.bench.attention import bench_attention, table

    typer.echo(table(bench_attention(out, "cuda", quick, only, jobs)))
