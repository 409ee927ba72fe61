"""What a recipe reads beside its checkpoints: tasks and calibration text, found and digested.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qbench import passkey
from qbench.checkpoints import Checkpoint
from qbench.errors import DataError, DataProblems, MissingDataError, RecipeError
from qbench.evaluation.definitions import expand
from qbench.evaluation.tasks import TaskSpec, plan_task
from qbench.preflight import require_texts
from qbench.quantizers.texts import CalibrationText, file_digest, find_text
from qbench.recipe import Recipe, Task


def find_tasks(
    recipe: Recipe, checkpoints: Iterable[Checkpoint]
) -> tuple[tuple[TaskSpec, ...], tuple[str, ...]]:
    """The tasks, and with ``skip_missing`` the names of those whose data are missing.

    Raises DataProblems with all that is wrong with their data, not the first of it alone.
    """
    definitions = recipe.resolve(recipe.definitions) if recipe.definitions else None
    data = recipe.resolve(recipe.data) if recipe.data else None
    found, skipped, problems = [], [], []
    for task in _leaf_tasks(recipe.tasks, definitions, _trained(recipe, checkpoints)):
        try:
            found.append(
                plan_task(
                    task.name,
                    data=data,
                    definitions=definitions,
                    files=task.files.evaluation,
                    fewshot_files=task.files.fewshot,
                    num_fewshot=task.num_fewshot,
                )
            )
        except DataError as error:
            if recipe.skip_missing and isinstance(error, MissingDataError):
                skipped.append(task.name)
            else:
                problems.append(error)
                if data is None:  # the hub: what ails one task ails the next, after minutes
                    break
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataProblems([str(error) for error in problems])
    if not found:
        raise DataProblems([f"{', '.join(skipped)}: no data in {data}; no task is left to run"])
    return tuple(found), tuple(skipped)


def _trained(recipe: Recipe, checkpoints: Iterable[Checkpoint]) -> int:
    """The longest context that a checkpoint was trained with, as far as recipe and files say."""
    stated = [one.max_length for one in checkpoints if one.max_length is not None]
    limit = recipe.evaluation.max_length
    known = stated if limit is None else [min(limit, length) for length in stated] or [limit]
    return max(known, default=passkey.SHORTEST)


def _leaf_tasks(tasks: tuple[Task, ...], definitions: Path | None, trained: int) -> list[Task]:
    """Tasks with groups and tags opened into their members."""
    leaves = [
        task.model_copy(update={"name": leaf})
        for task in tasks
        for leaf in _members(task.name, definitions, trained)
    ]
    names = [leaf.name for leaf in leaves]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"tasks: {', '.join(twice)} is there twice, once in a group or tag")
    return leaves


def _members(name: str, definitions: Path | None, trained: int) -> list[str]:
    if name == passkey.GROUP:
        return [passkey.task_name(length) for length in passkey.task_lengths(trained)]
    return [name] if passkey.task_length(name) is not None else expand(name, definitions)


def find_calibration(recipe: Recipe) -> CalibrationText | None:
    """The text that calibrated quantizers see; None where the recipe has none of them."""
    source = recipe.calibration
    if source is None or not any(c.quantization.needs_calibration for c in recipe.quantizers):
        return None
    data = recipe.resolve(recipe.data) if recipe.data else None
    path = find_text(source.path, base=recipe.folder, data=data)
    require_texts(path)
    return CalibrationText(
        path=path,
        digest=file_digest(path),
        samples=source.samples,
        length=source.length,
        seed=source.seed,
        bos=recipe.evaluation.add_bos,
    )
