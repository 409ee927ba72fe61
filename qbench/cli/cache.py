"""``qbench cache``: what runs keep for later ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from qbench import cache as kept
from qbench.cache import cache_folder, entries, in_words
from qbench.errors import ResultsError, some
from qbench.machine import GIB
from qbench.text import duration

RESULTS = Path("results")  # need not be there

cache = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List and bound what runs keep for later ones.",
)


@cache.command("list")
def list_entries(
    results: Annotated[
        list[Path],
        typer.Option(
            metavar="FOLDER",
            help="Results folders whose records say which cell uses what. Repeatable.",
        ),
    ] = [RESULTS],  # noqa: B006
) -> None:
    """What is kept, with sizes, ages and who uses it, the least recently used first.

    Examples:
    ```
    qbench cache list --results results
    ```
    """
    for one in results:
        if one != RESULTS and not one.is_dir():
            raise ResultsError(f"--results {one}: no such folder")
    folder = cache_folder()
    found = entries(folder, results)
    rows = [
        (
            one.kind,
            one.about,
            in_words(one.bytes),
            duration(time.time() - one.used),
            some(one.used_by, 3),
        )
        for one in found
    ]
    total = in_words(sum(one.bytes for one in found))
    if rows:
        head = ("kind", "what", "size", "unused for", "used by")
        typer.echo(tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True))
    typer.echo(f"{folder}: {len(found)} entries, {total}")


@cache.command()
def prune(
    max_gib: Annotated[
        float,
        typer.Option(
            min=0, help="Keep at most this much. The least recently used is removed first."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
) -> None:
    """Remove what nobody has used for longest, and what processes that died have left.

    What a run is at work on stays. What is gone is made again by the run that needs it.

    Examples:
    ```
    qbench cache prune --max-gib 20 --dry-run
    ```
    """
    removed, leftovers = kept.prune(cache_folder(), max_bytes=max_gib * GIB, dry_run=dry_run)
    word = "would remove" if dry_run else "removed"
    for one in removed:
        typer.echo(f"{word} {one.kind}: {one.about}, {in_words(one.bytes)}")
    for path in leftovers:
        typer.echo(f"{word} files that a dead process left: {path}")
    freed = in_words(sum(one.bytes for one in removed))
    typer.echo(f"{cache_folder()}: {word} {len(removed)} entries, {freed}")
