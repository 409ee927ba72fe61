"""What would fail in a cell, or has to be chosen for a model, before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.attention.implementation import NATIVE
from qbench.checkpoints.attention import choose_attention
from qbench.errors import QuantizationError, RecipeError, RecipeProblems
from qbench.evaluation.settings import Mode
from qbench.quantizers.texts import read_texts

if TYPE_CHECKING:
    from qbench.checkpoints import Checkpoint
    from qbench.checkpoints.shapes import Shapes
    from qbench.evaluation.tasks import TaskSpec
    from qbench.plan import Cell
    from qbench.quantizers import QuantizationConfig
    from qbench.recipe import Evaluation

CALIBRATION_LINES = 1_000  # read of a calibration text; a hub shard has hundreds of thousands


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoices:
    """What a checkpoint's class decides: ``attention`` and, in ``checkpoint``, its normalizer;
    the ``fastest`` mode that it can be scored in, and why that is ``slower`` than fast."""

    checkpoint: Checkpoint
    attention: str
    native: str  # why it runs on its own attention, "" where it does not
    fastest: Mode
    slower: str
    tried: bool

    def notes(self, mode: Mode, device: str) -> tuple[str, ...]:
        """What is chosen for the model that another one would not get, a line each."""
        notes = []
        if not self.tried:
            notes.append(
                f"{self.checkpoint.abilities.name} is none of the classes that were tried (qbench "
                "list models); its attention is compared with transformers' own when it is loaded"
            )
        if self.native:
            notes.append(f"attention native/{self.attention}: {self.native}")
        if self.slower and (device == "cuda" or mode == "lm-eval"):
            notes.append(f"scoring {mode}: {self.slower}")
        return tuple(notes)


def model_choices(
    name: str, checkpoint: Checkpoint, evaluation: Evaluation, device: str
) -> ModelChoices:
    """What the class of the checkpoint ``name`` decides about its cells.

    Raises RecipeError where ``evaluation`` asks for an attention that it cannot have.
    """
    can = checkpoint.abilities
    chosen = choose_attention(name, checkpoint, evaluation.attention, device)
    fastest, slower = can.scoring, can.slower
    if chosen.normalizer == NATIVE and fastest == "fast":
        fastest, slower = "exact", "packs need our attention"
    if not can.tried and evaluation.scoring != "auto":  # as asked; the scorer looks at it closely
        fastest, slower = "fast", ""
    return ModelChoices(
        checkpoint=replace(checkpoint, normalizer=chosen.normalizer),
        attention=chosen.implementation,
        native=chosen.why,
        fastest=fastest,
        slower=slower,
        tried=can.tried,
    )


def require_bos(name: str, checkpoint: Checkpoint, *, add_bos: bool) -> None:
    """Raises RecipeError where ``add_bos`` is asked for and the tokenizer would add none.

    Where classes of transformers have a say in what a tokenizer puts first, and where it seems to
    put none, they are asked, which imports torch.
    """
    if not add_bos:
        return
    if checkpoint.format != "transformers" and _file_adds_bos(checkpoint.folder):
        return
    from qbench.checkpoints import load_tokenizer
    from qbench.evaluation.scoring.requests import check_bos

    try:
        check_bos(load_tokenizer(checkpoint), add_bos)
    except RecipeError as error:
        raise RecipeError(f"checkpoints.{name}: {error}") from None


def resolved(
    checkpoint: Checkpoint, quantization: QuantizationConfig, device: str
) -> tuple[QuantizationConfig, str, str | None]:
    """``quantization`` with every open choice made, a line on what was chosen, and why it cannot
    run on ``device`` ("cpu" or "cuda"), or not with this checkpoint."""
    try:
        return *quantization.resolved(checkpoint.config, device), None
    except RecipeError as error:
        return quantization, "", str(error)


def refusal(checkpoint: Checkpoint, shapes: Shapes, quantization: QuantizationConfig) -> str | None:
    """Why a quantizer can never run with this checkpoint, whose linear layers have these
    ``shapes``; None where nothing speaks against it."""
    weights = quantization.weights
    try:
        if weights is not None:
            weights.check_layers(shapes)
    except QuantizationError as error:
        return str(error)
    if quantization.kv_cache is not None and checkpoint.normalizer == NATIVE:
        return (
            f"{checkpoint.abilities.name} runs on its own attention, and the KV cache is quantized "
            "in ours"
        )
    spared = checkpoint.abilities.spared
    if spared and weights is not None and spared not in weights.ignore:
        return (
            f"{checkpoint.abilities.name} reads the weight of {spared} by itself; say ignore: "
            f"[{spared}]"
        )
    return None


def require_runnable(cells: Iterable[Cell]) -> None:
    """Raises RecipeProblems for cells that can never run: a line a reason, with all of them."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.refusal is not None:
            reasons.setdefault(cell.refusal, []).append(cell.name)
    if reasons:
        lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        raise RecipeProblems([*lines, "these cells can never run; --only PATTERN runs others"])


def _file_adds_bos(folder: Path) -> bool:
    """Whether ``tokenizer.json`` alone says that a BOS is put first."""
    from tokenizers import Tokenizer

    try:
        about = json.loads((folder / "tokenizer_config.json").read_bytes())
        if "add_bos_token" in about or "add_eos_token" in about:  # replaces what the file says
            return False
        bos = about.get("bos_token")
        bos = bos["content"] if isinstance(bos, dict) else bos
        return Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").tokens[:1] == [bos]
    except Exception:  # whatever is wrong with the files, transformers says it
        return False


def require_room(name: str, tasks: Sequence[TaskSpec], max_length: int) -> None:
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
