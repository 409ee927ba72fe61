"""A recipe's tasks: names, files that stand for their splits, few-shot examples. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

from qbench.errors import shown
from qbench.recipe_fields import Strict, Whole
from qbench.records import TaskName

Stems = Annotated[tuple[TaskName, ...], Field(min_length=1)]


class Files(Strict):
    """File stems that may stand for a task's splits in a data folder, the one that is scored and
    the one that few-shot examples are drawn from; the first that exists is used. None: the split's
    own name alone."""

    evaluation: Stems | None = None
    fewshot: Stems | None = None


def _of_evaluation(value: Any) -> Any:
    """A list alone is of the evaluation split."""
    if isinstance(value, list):
        return Files(evaluation=TypeAdapter(Stems).validate_python(value))
    if not isinstance(value, dict | Files):
        raise ValueError(
            "must be a list of file names without .jsonl, or {evaluation: […], fewshot: […]} "
            f"(it is {shown(value)})"
        )
    return value


class Task(Strict):
    """A task by its lm-eval name."""

    name: TaskName
    files: Annotated[Files, BeforeValidator(_of_evaluation)] = Files()
    num_fewshot: Whole | None = Field(None, ge=0, le=10_000)
