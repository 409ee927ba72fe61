"""What commands say on the terminal."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console


def complain(line: str) -> None:
    """One line on standard error, in red where that can be shown."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(line, style="bold red", markup=False)


def show_written(paths: list[Path]) -> None:
    """Which files a command wrote, on standard error so that output can be piped."""
    typer.echo("written: " + ", ".join(str(path) for path in paths), err=True)
