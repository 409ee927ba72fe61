"""The errors that a user can meet. Each message gives location, value and remedy.

Quantization, audit and evaluation errors fail their cell; the others end a command with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

STOPPED = "stopped; finished cells are kept; run the same command to continue"
INTERRUPTED = 130  # exit code, as of a process that SIGINT ended


class QbenchError(Exception):
    """Base of all errors that a user can put right: ``lines``, one clear line a problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class RecipeError(QbenchError):
    """A recipe or an option says something impossible."""


class CheckpointError(QbenchError):
    """A checkpoint cannot be read as what it claims to be."""


class DataError(QbenchError):
    """Task or calibration data is missing or malformed."""


class MissingDataError(DataError):
    """A task's data are not in the data folder."""


class ResultsError(QbenchError):
    """A results folder or a baseline cannot be read."""


class DamagedError(ResultsError):
    """A file of a results folder is not what was written there; the next run makes it again."""


class SchemaError(ResultsError):
    """A file was written by a qbench whose records this one does not read."""


class NewerSchemaError(SchemaError):
    """That of a newer qbench: it is neither read nor replaced."""


class OutputError(QbenchError):
    """A file or a folder cannot be written."""


class UnavailableError(QbenchError):
    """A library, backend or device that was asked for is not there."""


class QuantizationError(QbenchError):
    """A quantizer refused this model or broke on it."""


class AuditError(QbenchError):
    """A model was not quantized as its cell says."""


class EvaluationError(QbenchError):
    """Scoring broke, or its difference from exact scoring left the stated tolerance."""


class TrainingError(QbenchError):
    """A training broke off, or cannot go on from what is there."""


SHOWN = 80  # characters of a value in a message


def shown(value: object, *, most: int = SHOWN) -> str:
    """``value`` for a message: its ``repr`` in one line, cut to ``most`` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        text = f"{type(value).__name__}: too large to show"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else text[: most - 1] + "…"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first few names, and how many there are beside."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException) -> str:
    """What a library's error says in its first line, and in the next where the first announces
    it; its class where it says nothing."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def validation_line(error: ValidationError) -> str:
    """The first problem of what pydantic refused, and its place."""
    first = error.errors()[0]
    location = ".".join(map(str, first["loc"])) or "all"
    return f"{location}: {first['msg'].removeprefix('Value error, ')}"


def failure_line(problem: Exception) -> str:
    """What went wrong with a cell, for its record; its log has the traceback."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if isinstance(problem, QbenchError):
        return " ".join(lines)
    first = lines[0] if lines else ""
    return f"{type(problem).__name__}: {first} (the traceback is in its log)"
