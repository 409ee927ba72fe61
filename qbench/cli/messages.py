"""Print on standard error which files were written and what went wrong."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from qbench.errors import QbenchError, shown


def complain(line: str) -> None:
    """Print one line on standard error, in red if the terminal can; escape unprintable characters,
    such as a line break in a path.
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    console.print(text, style="bold red", markup=False)


def refuse(error: Exception) -> NoReturn:
    """Print what was wrong, one line per problem, and end with exit code 2."""
    with suppress(OSError):  # standard error may be on the full disk, too
        for line in error.lines if isinstance(error, QbenchError) else [_said(error)]:
            complain(line)
    sys.exit(2)


def _said(error: Exception) -> str:
    """Return one line for an error of the machine or the input."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, UnicodeEncodeError):
        return f"text that {error.encoding} cannot hold: {shown(error.object[error.start :])}"
    if isinstance(error, UnicodeError):
        return f"not UTF-8 text ({error})"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def show_written(paths: list[Path]) -> None:
    """Print which files a command wrote, on standard error so that output can be piped."""
    typer.echo("written: " + ", ".join(str(path) for path in paths), err=True)
