"""The results folder that a command reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from qbench.store import Store


def opened(folder: Path, run: str | None, option: str = "--run") -> Store:
    """The results of a ``run``, or of the last one; where a folder holds several, standard error
    is told which that is."""
    from qbench.store import Store, run_id, runs

    store = Store(folder, run=run)
    known = [name for name, _ in runs(folder)]
    if store.run is None and len(known) > 1:
        last = run_id(store.grid())
        others = ", ".join(name for name in known if name != last)
        typer.echo(
            f"{folder} holds {len(known)} runs; this is the last one, {last}; {option} takes "
            f"another: {others}",
            err=True,
        )
    return store
