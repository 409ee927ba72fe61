"""Define the errors that a user can meet. Each message gives place, value and remedy.

An error within a cell fails that cell, and the run goes on; any other ends the command with code 2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

STOPPED = "stopped; finished cells are kept; run the same command to continue"
INTERRUPTED = 130  # exit code, as of a process that SIGINT ended


LONG_WORD = re.compile(r"\S{501,}")  # longer than any path
SHOWN = 80  # characters of a value in a message


class QbenchError(Exception):
    """Base of all errors that a user can put right. ``lines`` has one line per problem; a word of
    more than 500 characters is cut to 80."""

    def __init__(self, *lines: str) -> None:
        lines = tuple(LONG_WORD.sub(lambda word: word[0][:SHOWN] + "…", line) for line in lines)
        super().__init__("\n".join(lines))
        self.lines = lines


class RecipeError(QbenchError):
    """A recipe or an option has a value that cannot work."""


class CheckpointError(QbenchError):
    """Files of a checkpoint cannot be read, or contradict each other."""


class DataError(QbenchError):
    """Task or calibration data is missing or malformed."""


class MissingDataError(DataError):
    """A task's data are not in the data folder."""


class ResultsError(QbenchError):
    """A results folder or a baseline cannot be read."""


class DamagedError(ResultsError):
    """A file of a results folder changed since it was written; the next run makes it again."""


class NewerSchemaError(ResultsError):
    """A file was written by a newer qbench; it is neither read nor replaced."""


class OutputError(QbenchError):
    """A file or a folder cannot be written."""


class UnavailableError(QbenchError):
    """A requested library, backend or device is not there."""


class QuantizationError(QbenchError):
    """A quantizer refused this model or broke on it."""


class AuditError(QbenchError):
    """The audit measured that a model is not quantized as its cell says."""


class EvaluationError(QbenchError):
    """Scoring failed, or differs from exact scoring by more than the tolerance."""


class TrainingError(QbenchError):
    """A training failed, or cannot continue from its files."""


def shown(value: object, *, most: int = SHOWN) -> str:
    """Return ``value`` for a message: its ``repr`` in one line, cut to ``most`` characters."""
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else text[: most - 1] + "…"


def some(names: Sequence[str], most: int = 8) -> str:
    """Return the first ``most`` names joined by commas, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the second if the first ends in a colon;
    the name of its class if it has no message."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def validation_line(error: ValidationError) -> str:
    """Return the place, if it has one, and the message of the first problem of a pydantic error:
    ``limit: Input should be …``."""
    first = error.errors()[0]
    place = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
    return place + first["msg"].removeprefix("Value error, ")


def failure_line(problem: BaseException) -> str:
    """Return why a cell failed, in one line for its record: all lines of a QbenchError, else the
    error's class and first line (the traceback is in the cell's log)."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if isinstance(problem, QbenchError):
        return " ".join(lines)
    first = lines[0] if lines else ""
    return f"{type(problem).__name__}: {first} (the traceback is in its log)"
