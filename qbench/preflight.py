"""What would fail in a cell and can be seen before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import RecipeError
from qbench.quantizers.texts import read_texts

if TYPE_CHECKING:
    from qbench.checkpoints import Checkpoint
    from qbench.evaluation.planned import PlannedTask
    from qbench.recipe import Column

CALIBRATION_LINES = 1_000  # read of a calibration text; a hub shard has hundreds of thousands


def require_bos(name: str, checkpoint: Checkpoint, *, add_bos: bool) -> None:
    """Raises RecipeError where ``add_bos`` is asked for and the tokenizer would add none.

    Only transformers knows what a tokenizer puts first, so that this asks it, and imports torch.
    """
    if not add_bos:
        return
    from qbench.checkpoints import load_tokenizer
    from qbench.evaluation.scoring.tokenization import check_bos

    try:
        check_bos(load_tokenizer(checkpoint), add_bos)
    except RecipeError as error:
        raise RecipeError(f"checkpoints.{name}: {error}") from None


def require_able(name: str, checkpoint: Checkpoint, column: Column, device: str) -> None:
    """Raises RecipeError where a quantizer's parts cannot run on ``device`` ("cpu" or "cuda"), or
    not with this checkpoint."""
    try:
        column.quantizer.check(checkpoint.config, device)
    except RecipeError as error:
        raise RecipeError(f"quantizers: {column.label}: checkpoints.{name}: {error}") from None


def require_room(name: str, tasks: Sequence[PlannedTask], max_length: int) -> None:
    """Raises RecipeError for a task that generates as many tokens as ``max_length``, or more:
    no room would be left for its prompt."""
    for task in tasks:
        if task.output_type == "generate_until" and task.max_gen_toks >= max_length:
            raise RecipeError(
                f"tasks: {task.name} generates up to {task.max_gen_toks} tokens, which leaves no "
                f"room for its prompt in the {max_length} of checkpoints.{name}; raise "
                "evaluation.max_length or leave the task out"
            )


def require_texts(path: Path) -> None:
    """Raises DataError where the beginning of a calibration file is malformed."""
    read_texts(path, most=CALIBRATION_LINES)
