"""Copies by GPTQModel's ParoQuant: rotations of pairs of inputs, and the weights after them."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from qbench.quantizers.config import settings
from qbench.quantizers.methods.by_gptqmodel import run
from qbench.quantizers.methods.library_made import LibraryMade, Texts, maker
from qbench.quantizers.methods.weight_only import GroupedIntegers


@maker("paroquant-4bit", "ParoQuant by GPTQModel; trained, minutes to hours on a GPU", num_bits=4)
@settings
class ParoQuant(LibraryMade, GroupedIntegers):
    """Trained layer by layer, with eager attention, in two stages of ``epochs`` each."""

    method, title, requirements = "paroquant", "ParoQuant", ("gptqmodel",)
    softmax_only = True
    epochs: int = Field(10, ge=1, description="of training per stage")
    rows: int = Field(2048, ge=64, description="of a layer's inputs, drawn evenly, in an epoch")


def make(model: Path, out: Path, texts: Texts, settings: ParoQuant) -> None:
    """Write a copy of ``model`` by ParoQuant to the folder ``out``. See the module
    ``library_made``."""
    epochs = dict.fromkeys(("opt_rotation_epochs", "opt_finetune_epochs"), settings.epochs)
    # its kernel rotates groups of 128; without it the library would train group by group
    fused = settings.group_length(0) == 128
    options = {"opt_fused_rotation": fused, "opt_train_samples": settings.rows, **epochs}
    run(model, out, texts, settings, method="paroquant", **options)
