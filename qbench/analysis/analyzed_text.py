"""The texts that are analyzed, and the settings of an analysis. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import RecipeError
from qbench.evaluation.tasks import TaskSpec, read_rows

LENGTH = 512  # tokens of a text, unless a checkpoint has a shorter context
FIELD = "text"
BATCH_TOKENS = {"cpu": 8192, "cuda": 16_384}  # read at once; a longer text is read by itself
ROLLING = "loglikelihood_rolling"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """The texts of one ``field`` of a JSON Lines file, or the documents of a task that scores whole
    texts, each as the task scores it; ``digest`` is that of the file or the task."""

    name: str
    digest: str
    field: str | None
    texts: Callable[[], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisSettings:
    """At most ``samples`` texts, each cut to its first ``length`` tokens, BOS counted if ``bos``.
    ``blocks``: a sensitivity quantizes decoder layers one at a time, not linear layers."""

    source: TextSource
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
        """Return, for keys, what determines the analyzed tokens and the batches, by name."""
        return {
            "text": self.source.digest,
            "field": self.source.field,
            "samples": self.samples,
            "length": self.length,
            "bos": self.bos,
            "batch": self.batch,
        }


def text_file(path: Path, field: str) -> TextSource:
    """Return the texts of a JSON Lines file, which is read now. Raises DataError if a line is
    malformed or lacks ``field``."""
    rows, digest = read_rows(path)
    texts = [row.text(field, path) for row in rows]
    name = f"{path.name}, field {field}"
    return TextSource(name=name, digest=digest, field=field, texts=lambda: texts)


def task_text(tasks: tuple[TaskSpec, ...], skipped: tuple[str, ...]) -> TextSource:
    """Return the texts of the first of ``tasks`` that scores whole texts. They are loaded when they
    are asked for. ``skipped``: names of tasks without data, for the message. Raises RecipeError if
    no task scores whole texts."""
    task = next((task for task in tasks if task.output_type == ROLLING), None)
    if task is None:
        without = f" ({', '.join(skipped)}: no data)" if skipped else ""
        raise RecipeError(
            f"tasks: none of the recipe's scores whole texts (as wikitext does){without}, so there "
            "is no text to analyze; name one with --text FILE.jsonl"
        )

    def texts() -> list[str]:
        from qbench.evaluation.evaluate import load_task

        loaded = load_task(task).task
        return [loaded.doc_to_target(document) for document in loaded.eval_docs]

    return TextSource(name=f"task {task.name}", digest=task.digest, field=None, texts=texts)


def default_length(contexts: Iterable[int | None]) -> int:
    """Return LENGTH, or the shortest of ``contexts`` (None: not stated) if that is shorter."""
    return min([LENGTH, *(context for context in contexts if context is not None)])
