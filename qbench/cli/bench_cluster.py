"""``qbench bench cluster`` and ``qbench bench faults``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qbench.cli.options import to_file
from qbench.cli.screen import show_written
from qbench.files import write_atomically


def cluster(
    out: Annotated[Path | None, to_file("Write the table here.")] = None,
    cells: Annotated[int, typer.Option(min=2, help="Cells, which need no model.")] = 1000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of this host.")] = 16,
) -> None:
    """What a cluster's engine itself costs: cells by the thousand that need no model."""
    from qbench.bench.cluster_scale import bench_scale, table
    from qbench.cluster.connect import require_dask

    require_dask()
    _show(table(bench_scale(cells, workers)), out)


def faults(
    out: Annotated[Path | None, to_file("Write the table here.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each fault.")] = 5,
    only: Annotated[str, typer.Option(help="Faults that match this glob.")] = "*",
) -> None:
    """Workers, cells, networks, schedulers and clients that fail in the middle of a run."""
    from qbench.bench.cluster_faults import bench_faults, table
    from qbench.cluster.connect import require_dask

    require_dask()
    found = bench_faults(rounds, only, lambda line: typer.echo(line, err=True))
    _show(table(found), out)
    if not all(one.right for one in found):
        raise typer.Exit(1)


def _show(table: str, out: Path | None) -> None:
    typer.echo(table)
    if out is not None:
        write_atomically(out, (table + "\n").encode())
        show_written([out])
