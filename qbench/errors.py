"""The errors that a user can meet. Each message gives location, value and remedy.

QbenchError                 anything a user can put right; the command line prints one line
├── RecipeError             a recipe or an option says something impossible        (exit 2)
├── CheckpointError         a checkpoint cannot be read as what it claims to be    (exit 2)
├── DataError               task or calibration data is missing or malformed       (exit 2)
├── ResultsError            a results folder or baseline cannot be read            (exit 2)
│   ├── DamagedError        a file is not what was written; a run makes it again
│   └── SchemaError         a file was written by an older or newer qbench
├── OutputError             a file or folder cannot be written                     (exit 2)
├── UnavailableError        a library, backend or device that was asked for is not there
│                                                                                  (exit 2)
├── QuantizationError       a quantizer refused or broke on this model       (failed cell)
├── AuditError              a model was not quantized as its cell says       (failed cell)
├── EvaluationError         scoring broke or left its stated tolerance       (failed cell)
└── TrainingError           a training broke off, or cannot go on                  (exit 2)
"""

from __future__ import annotations

STOPPED = "stopped; finished cells are kept, run the same command to go on"
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
