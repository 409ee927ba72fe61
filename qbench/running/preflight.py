"""What would fail in a cell and can be seen before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import RecipeError

if TYPE_CHECKING:
    from qbench.checkpoints import Checkpoint
    from qbench.evaluation.tasks import LoadedTask

CALIBRATION_LINES = 1_000  # read of a calibration text; a hub shard has hundreds of thousands
MAX_GEN_TOKS = 256  # lm-eval's, where a task states none


def require_bos(name: str, checkpoint: Checkpoint, *, add_bos: bool) -> None:
    """Raises RecipeError where ``add_bos`` is asked for and the tokenizer would add none."""
    if not add_bos:
        return
    from qbench.checkpoints import load_tokenizer
    from qbench.evaluation.scoring.tokenization import check_bos

    try:
        check_bos(load_tokenizer(checkpoint), add_bos)
    except RecipeError as error:
        raise RecipeError(f"checkpoints.{name}: {error}") from None


def require_room(name: str, tasks: Sequence[LoadedTask], max_length: int) -> None:
    """Raises RecipeError for a task that generates as many tokens as ``max_length``, or more:
    no room would be left for its prompt."""
    for task in tasks:
        config = task.task.config
        if config.output_type != "generate_until":
            continue
        wanted = int((config.generation_kwargs or {}).get("max_gen_toks", MAX_GEN_TOKS))
        if wanted >= max_length:
            raise RecipeError(
                f"tasks: {task.name} generates up to {wanted} tokens, which leaves no room for "
                f"its prompt in the {max_length} of checkpoints.{name}; raise "
                "evaluation.max_length or leave the task out"
            )


def require_texts(path: Path) -> None:
    """Raises DataError where the beginning of a calibration file is malformed."""
    from qbench.quantizers.calibration import read_texts

    read_texts(path, CALIBRATION_LINES)
