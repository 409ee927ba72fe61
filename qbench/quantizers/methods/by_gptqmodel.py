"""Copies that GPTQModel makes with its own defaults, but for the sizes of groups and batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

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


def make(model: Path, out: Path, texts: Texts, settings: ByGptqmodel | GptqByGptqmodel) -> None:
    """Write a copy of ``model`` by GPTQModel to the folder ``out``: see ``library_made``."""
    options: dict[str, Any] = OPTIONS.get(settings.method, {"method": settings.method})
    if isinstance(settings, GptqByGptqmodel):
        order = {"act_group_aware": settings.order == "group-aware", "desc_act": settings.desc_act}
        options = {"sym": settings.symmetric, **order}
    run(model, out, texts, settings, **options)


def run(model: Path, out: Path, texts: Texts, settings: GroupedIntegers, **options: Any) -> None:
    """Quantize ``model`` by GPTQModel with ``options`` of its class, and save it in ``out``."""
    # its pool stops with fewer workers, and its packing kernel would be compiled first
    os.environ |= {"GPTQMODEL_CPU_WORKERS": "2", "GPTQMODEL_DISABLE_PACK_EXT": "1"}
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    options |= {"bits": settings.num_bits, "group_size": settings.group_length(0) or -1}
    library = GPTQModel.load(str(model), QuantizeConfig(**options))
    backend = BACKEND.AWQ_TORCH if settings.method == "awq" else BACKEND.AUTO  # others compile
    size = max(1, 16_384 // texts.shape[1])  # its own work per layer and batch takes milliseconds
    library.quantize([{"input_ids": row} for row in texts], batch_size=size, backend=backend)
    library.save(str(out))
