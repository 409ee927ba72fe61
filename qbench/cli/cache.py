"""List and bound what runs keep for later ones (``qbench cache``)."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from tabulate import tabulate

from qbench import cache as kept
from qbench.cache import entries, in_words
from qbench.cli.options import CommandGroup
from qbench.files import cache_folder
from qbench.machine import GIB
from qbench.text import duration

cache = CommandGroup("List and bound what runs keep for later ones.")


@cache.command("list")
def list_entries() -> None:
    """List what is kept with sizes and ages, the least recently used first.

    Examples:
    ```
    qbench cache list
    ```
    """
    listed = entries(cache_folder())
    now = time.time()
    rows = [(entry.name, in_words(entry.bytes), duration(now - entry.used)) for entry in listed]
    if rows:
        head = ("what", "size", "unused for")
        typer.echo(tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True))
    total = in_words(sum(entry.bytes for entry in listed))
    typer.echo(f"{cache_folder()}: {len(listed)} entries, {total}")


@cache.command("prune")
def prune(
    max_gib: Annotated[float, typer.Option(min=0)],
    dry_run: bool = False,
) -> None:
    """Remove what was not used for longest, and the files that killed processes left.

    What a run uses stays. What is gone is made again by the run that needs it.

    Examples:
    ```
    qbench cache prune --max-gib 20 --dry-run
    ```

    Options:
    max_gib: Keep at most this much. The least recently used is removed first.
    dry_run: Only show what would be removed.
    """
    pruned = kept.prune(cache_folder(), max_bytes=max_gib * GIB, dry_run=dry_run)
    word = "would remove" if dry_run else "removed"
    for entry in pruned.removed:
        typer.echo(f"{word} {entry.name}, {in_words(entry.bytes)}")
    for entry in pruned.in_use:
        typer.echo(f"kept {entry.name}, {in_words(entry.bytes)}: a run uses it")
    for path in pruned.leftovers:
        typer.echo(f"removed what a killed process left: {path}")
    freed = in_words(sum(entry.bytes for entry in pruned.removed))
    typer.echo(f"{cache_folder()}: {word} {len(pruned.removed)} entries, {freed}")
