"""What commands say on standard error: files that were written, and what went wrong."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from qbench.errors import QbenchError, shown

UNMAPPED = "failed to map segment"  # the loader's word for a library without room


def complain(line: str) -> None:
    """One line on standard error, in red where that can be shown.

    What is not printable, as a line break in a path, is escaped.
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        console.print(text, style="bold red", markup=False)
    except MemoryError:  # what is complained of: plainly, then
        sys.stderr.write(f"{text}\n")


def refuse(error: Exception) -> NoReturn:
    """End with exit code 2 and what was wrong, one line a problem.

    Raises ``error`` again where it is an ImportError that is not for lack of memory.
    """
    if isinstance(error, ImportError) and UNMAPPED not in str(error):
        raise error
    with suppress(OSError):  # standard error may be on the full disk, too
        for line in error.lines if isinstance(error, QbenchError) else [_said(error)]:
            complain(line)
    sys.exit(2)


def _said(error: Exception) -> str:
    """One line on an error that is the machine's or the input's, not this program's."""
    if isinstance(error, MemoryError | ImportError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, UnicodeEncodeError):
        return f"text that {error.encoding} cannot hold: {shown(error.object[error.start :])}"
    if isinstance(error, UnicodeError):
        return f"not UTF-8 text ({error})"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def show_written(paths: list[Path]) -> None:
    """Which files a command wrote, on standard error so that output can be piped."""
    typer.echo("written: " + ", ".join(str(path) for path in paths), err=True)
