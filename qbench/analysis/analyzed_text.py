"""The texts that are analyzed, and the settings of an analysis. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import DataError, RecipeError
from qbench.evaluation.tasks import TaskSpec, read_rows

LENGTH = 512  # tokens of a text, unless a checkpoint has a shorter context
FIELD = "text"
BATCH_TOKENS = {"cpu": 8192, "cuda": 16_384}  # read at once; a longer text is read by itself
ROLLING = "loglikelihood_rolling"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """The texts in the ``field`` of each line of a JSON Lines file."""

    path: Path
    field: str
    digest: str  # SHA-256 of the file's bytes

    @property
    def name(self) -> str:
        return f"{self.path.name}, field {self.field}"

    def texts(self) -> list[str]:
        """Return the texts. Raises DataError if the file was changed after planning."""
        rows, digest = read_rows(self.path)
        if digest != self.digest:
            raise DataError(f"{self.path}: changed after this run began; run again")
        return [row.text(self.field, self.path) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskText:
    """The documents of a task that scores whole texts, each as the task scores it."""

    task: TaskSpec

    @property
    def name(self) -> str:
        return f"task {self.task.name}"

    @property
    def digest(self) -> str:
        return self.task.digest

    def texts(self) -> list[str]:
        from qbench.evaluation.evaluate import load_task

        loaded = load_task(self.task).task
        return [loaded.doc_to_target(document) for document in loaded.eval_docs]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisSettings:
    """At most ``samples`` texts, each cut to its first ``length`` tokens, BOS counted if ``bos``.

    ``blocks``: a sensitivity quantizes decoder layers one at a time, not linear layers.
    """

    source: TextFile | TaskText
    samples: int
    length: int
    bos: bool
    device: str
    blocks: bool = False

    @property
    def batch(self) -> int:
        """Return how many texts are read in one forward pass."""
        return max(1, BATCH_TOKENS[self.device] // self.length)

    def key_parts(self) -> dict[str, Any]:
        """Return what determines the analyzed tokens, for keys."""
        field = self.source.field if isinstance(self.source, TextFile) else None
        return {
            "text": self.source.digest,
            "field": field,
            "samples": self.samples,
            "length": self.length,
            "bos": self.bos,
            "batch": self.batch,
        }


def text_file(path: Path, field: str) -> TextFile:
    """Return the texts of a JSON Lines file. Raises DataError if a line is malformed or lacks
    ``field``."""
    rows, digest = read_rows(path)
    for row in rows:
        row.text(field, path)
    return TextFile(path=path, field=field, digest=digest)


def task_text(tasks: tuple[TaskSpec, ...], skipped: tuple[str, ...]) -> TaskText:
    """Return the texts of the first of ``tasks`` that scores whole texts. ``skipped``: names of
    tasks without data. Raises RecipeError if there is none."""
    for task in tasks:
        if task.output_type == ROLLING:
            return TaskText(task=task)
    without = f" ({', '.join(skipped)}: no data)" if skipped else ""
    raise RecipeError(
        f"tasks: none of the recipe's scores whole texts (as wikitext does){without}, so there is "
        "no text to analyze; name one with --text FILE.jsonl"
    )


def default_length(contexts: Iterable[int | None]) -> int:
    """Return the tokens per text: LENGTH, or the shortest of the checkpoints' ``contexts`` (None:
    not stated) if that is shorter."""
    return min([LENGTH, *(context for context in contexts if context is not None)])
