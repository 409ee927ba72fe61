"""Which attention a checkpoint runs on: ours, or its class's own. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from qbench.attention.implementation import NATIVE, choose
from qbench.checkpoints.checkpoint import Checkpoint
from qbench.errors import RecipeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """``implementation``: reference or triton, or for ``native`` sdpa or eager; ``why`` it is
    native, "" where it is not."""

    normalizer: str
    implementation: str
    why: str = ""


def choose_attention(name: str, checkpoint: Checkpoint, wanted: str, device: str) -> Chosen:
    """What the checkpoint ``name`` of a recipe runs on where ``evaluation.attention`` is
    ``wanted``.

    Raises RecipeError where that cannot be had, UnavailableError where triton cannot run.
    """
    can, trained = checkpoint.abilities, checkpoint.normalizer
    if NATIVE in (trained, wanted):
        if trained not in (NATIVE, can.normalizer):
            raise RecipeError(
                f"evaluation.attention: native: checkpoints.{name} was trained with {trained}, "
                f"which {can.name} of transformers does not compute; say attention: auto"
            )
        return Chosen(normalizer=NATIVE, implementation=can.own, why="the recipe says so")
    if not can.native:
        return Chosen(normalizer=trained, implementation=choose(trained, wanted, device))
    if trained != can.normalizer:
        raise RecipeError(
            f"checkpoints.{name}: it was trained with {trained}, and {can.name} cannot run on our "
            f"attention: {can.native}"
        )
    if wanted != "auto":
        raise RecipeError(
            f"evaluation.attention: {wanted}: checkpoints.{name} is a {can.name}, which runs on "
            f"its own attention alone ({can.native}); say attention: auto or native"
        )
    return Chosen(normalizer=NATIVE, implementation=can.own, why=can.native)
