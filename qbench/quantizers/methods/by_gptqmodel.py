"""Copies that GPTQModel makes with its own defaults, but for the sizes of groups and batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import CALIBRATED, LibraryMade, Texts, maker
from qbench.quantizers.methods.weight_only import ColumnOrder, GroupedIntegers

ABOUT = f"by GPTQModel, {{num_bits}} bits; {CALIBRATED}"
TITLES = {"gptaq": "GPTAQ", "awq": "AWQ", "paroquant": "ParoQuant", "exl3": "EXL3"}
FEW = (2, 3, 4)
BATCH = 16_384  # tokens: the library's own work per layer and batch takes milliseconds


@maker("gptqmodel-{num_bits}bit", f"GPTQ {ABOUT}", num_bits=(2, 3, 4, 8))
@settings
class GptqByGptqmodel(ColumnOrder, LibraryMade):
    """GPTQ by the library, with its own damping."""

    method, title, requirements = "gptqmodel", "GPTQ by GPTQModel", ("gptqmodel",)


@maker("exl3-{num_bits}bit", f"EXL3 {ABOUT} only", num_bits=FEW, method="exl3", group_size=-1)
@maker("paroquant-4bit", f"ParoQuant {ABOUT} only", num_bits=4, method="paroquant")
@maker("awq-4bit", f"AWQ {ABOUT}", num_bits=4, method="awq")
@maker("gptaq-{num_bits}bit", f"GPTAQ {ABOUT}", num_bits=FEW, method="gptaq")
@settings
class ByGptqmodel(GroupedIntegers, LibraryMade):
    """AWQ, EXL3, ParoQuant with eager attention, and GPTAQ, which sees earlier layers' errors."""

    requirements = ("gptqmodel",)
    method: Literal["gptaq", "awq", "paroquant", "exl3"]
    title = property(lambda self: TITLES[self.method])
    needs_gpu = property(lambda self: self.method in ("paroquant", "exl3"))
    softmax_only = property(lambda self: self.method == "paroquant")
    blocks = property(lambda self: (128, 128) if self.method == "exl3" else (1, 1))


def make(model: Path, out: Path, texts: Texts, settings: ByGptqmodel | GptqByGptqmodel) -> None:
    # its pool stops with fewer workers, and its packing kernel would be compiled first
    os.environ |= {"GPTQMODEL_CPU_WORKERS": "2", "GPTQMODEL_DISABLE_PACK_EXT": "1"}
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    options: dict[str, Any] = {"method": settings.method}
    if isinstance(settings, GptqByGptqmodel):
        options = {"sym": settings.symmetric, "desc_act": settings.desc_act}
        options["act_group_aware"] = settings.order == "group-aware"
    elif settings.method == "gptaq":
        options = {"gptaq": {}}
    options |= {} if settings.method == "exl3" else {"group_size": settings.group_length(0) or -1}
    library = GPTQModel.load(str(model), QuantizeConfig(bits=settings.num_bits, **options))
    # of AWQ's kernels the others are compiled for minutes, or need a GPU
    backend = BACKEND.AWQ_TORCH if settings.method == "awq" else BACKEND.AUTO
    size = max(1, BATCH // texts.shape[1])
    library.quantize([{"input_ids": row} for row in texts], batch_size=size, backend=backend)
    library.save(str(out))
