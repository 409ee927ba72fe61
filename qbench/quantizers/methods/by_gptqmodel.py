"""Copies that GPTQModel makes with its own defaults, but for the sizes of groups and batches, and
for ParoQuant's training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import CALIBRATED, LibraryMade, Texts, maker
from qbench.quantizers.methods.weight_only import ColumnOrder, GroupedIntegers

ABOUT, FEW = f"by GPTQModel, {{num_bits}} bits; {CALIBRATED}", (2, 3, 4)
# AWQ would copy its activations from the host for each of the 20 ratios that it tries
OPTIONS = {"gptaq": {"gptaq": {}}, "awq": {"method": "awq", "scale_search_chunked_activations": 0}}


@maker("gptqmodel-{num_bits}bit", f"GPTQ {ABOUT}", num_bits=(2, 3, 4, 8))
@settings
class GptqByGptqmodel(LibraryMade, ColumnOrder):
    """GPTQ by the library, with its own damping."""

    method, title, requirements = "gptqmodel", "GPTQ by GPTQModel", ("gptqmodel",)


@maker("exl3-{num_bits}bit", f"EXL3 {ABOUT} only", num_bits=FEW, method="exl3", group_size=-1)
@maker("awq-4bit", f"AWQ {ABOUT}", num_bits=4, method="awq")
@maker("gptaq-{num_bits}bit", f"GPTAQ {ABOUT}", num_bits=FEW, method="gptaq")
@settings
class ByGptqmodel(LibraryMade, GroupedIntegers):
    """AWQ, EXL3, and GPTAQ, which sees the errors of earlier layers."""

    requirements = ("gptqmodel",)
    method: Literal["gptaq", "awq", "exl3"]
    title = property(lambda self: self.method.upper())
    needs_gpu = property(lambda self: self.method == "exl3")
    blocks = property(lambda self: (128, 128) if self.method == "exl3" else super().blocks)


@maker("paroquant-4bit", "ParoQuant by GPTQModel; trained, minutes to hours on a GPU", num_bits=4)
@settings
class ParoQuant(LibraryMade, GroupedIntegers):
    """Rotations of pairs of inputs, and the weights after them, trained layer by layer, with eager
    attention, in two stages of ``epochs`` each."""

    method, title, requirements = "paroquant", "ParoQuant", ("gptqmodel",)
    softmax_only = True
    epochs: int = Field(10, ge=1, description="of training per stage")
    rows: int = Field(2048, ge=64, description="of a layer's inputs, drawn evenly, in an epoch")


def make(
    model: Path, out: Path, texts: Texts, settings: ByGptqmodel | GptqByGptqmodel | ParoQuant
) -> None:
    """Write a copy of ``model`` by GPTQModel to the folder ``out``: see ``library_made``."""
    options: dict[str, Any] = {**OPTIONS.get(settings.method, {"method": settings.method})}
    if isinstance(settings, GptqByGptqmodel):
        order = {"act_group_aware": settings.order == "group-aware", "desc_act": settings.desc_act}
        options = {"sym": settings.symmetric, **order}
    if isinstance(settings, ParoQuant):
        options |= dict.fromkeys(("opt_rotation_epochs", "opt_finetune_epochs"), settings.epochs)
        # its kernel rotates groups of 128; without it the library would train group by group
        options["opt_fused_rotation"] = settings.group_length(0) == 128
        options["opt_train_samples"] = settings.rows
    # its pool stops with fewer workers, and its packing kernel would be compiled first
    os.environ |= {"GPTQMODEL_CPU_WORKERS": "2", "GPTQMODEL_DISABLE_PACK_EXT": "1"}
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    options |= {"bits": settings.num_bits, "group_size": settings.group_length(0) or -1}
    library = GPTQModel.load(str(model), QuantizeConfig(**options))
    backend = BACKEND.AWQ_TORCH if settings.method == "awq" else BACKEND.AUTO  # others compile
    size = max(1, 16_384 // texts.shape[1])  # its own work per layer and batch takes milliseconds
    library.quantize([{"input_ids": row} for row in texts], batch_size=size, backend=backend)
    library.save(str(out))
