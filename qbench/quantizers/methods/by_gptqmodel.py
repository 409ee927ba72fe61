"""Copies that GPTQModel makes with its own defaults, but for the size of groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qbench.errors import QuantizationError
from qbench.quantizers.config import settings
from qbench.quantizers.formats import WHOLE_ROW
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.methods.weight_only import ColumnOrder, GroupedIntegers
from qbench.quantizers.registry import register

if TYPE_CHECKING:
    from torch import Tensor

FEW_BITS = (2, 3, 4)
EXL3_BLOCK = 128
BATCH = 16_384  # tokens: the library's own work per layer and batch takes milliseconds
# Title, widths, and other options that are fixed, by method. GPTAQ also corrects for the error of
# earlier layers (Li et al. 2025). AWQ is activation-aware (Lin et al. 2023). ParoQuant rotates
# before rounding, with eager attention. EXL3 has trellis codes, without groups.
METHODS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "gptaq": ("GPTAQ", FEW_BITS, {}),
    "awq": ("AWQ", (4,), {}),
    "paroquant": ("ParoQuant", (4,), {}),
    "exl3": ("EXL3", FEW_BITS, {"group_size": WHOLE_ROW}),
}


@settings
class MadeByGptqmodel(LibraryMade):
    package: ClassVar[str] = "gptqmodel"
    install: ClassVar[str] = "pip install gptqmodel"
    requirements = ("gptqmodel",)
    needs_calibration = True

    @property
    def library_options(self) -> dict[str, Any]:
        """Options of GPTQModel's ``QuantizeConfig`` beside bits and the size of groups."""
        from gptqmodel.quantization.config import FORMAT, METHOD, GPTAQConfig

        return {
            "gptaq": {"gptaq": GPTAQConfig()},
            "awq": {"method": METHOD.AWQ, "format": FORMAT.GEMM},
            "paroquant": {"method": METHOD.PARO, "format": FORMAT.PAROQUANT},
            "exl3": {"method": METHOD.EXL3, "format": FORMAT.EXL3},
        }[self.method]


@register(
    "gptqmodel-{num_bits}bit",
    "GPTQ by GPTQModel, {num_bits} bits; calibrated, minutes on a GPU",
    num_bits=(2, 3, 4, 8),
    ignore=((),),
)
@settings
class GptqByGptqmodel(ColumnOrder, MadeByGptqmodel):
    """GPTQ by the library, with its own damping."""

    method: ClassVar[str] = "gptqmodel"
    title: ClassVar[str] = "GPTQ by GPTQModel"

    @property
    def library_options(self) -> dict[str, Any]:
        aware = self.order == "group-aware"
        return {"sym": self.symmetric, "desc_act": self.desc_act, "act_group_aware": aware}


@settings
class ByGptqmodel(GroupedIntegers, MadeByGptqmodel):
    """Integers in groups, or the trellis codes of EXL3."""

    method: Literal["gptaq", "awq", "paroquant", "exl3"]

    @property
    def title(self) -> str:
        return METHODS[self.method][0]

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        if self.method == "exl3" and (rows % EXL3_BLOCK or columns % EXL3_BLOCK):
            raise QuantizationError(
                f"{self.name}: {name} is {rows} × {columns}; EXL3 rotates blocks of {EXL3_BLOCK} "
                "inputs and outputs"
            )

    @property
    def needs_gpu(self) -> bool:
        return self.method in ("paroquant", "exl3")

    @property
    def softmax_only(self) -> bool:
        return self.method == "paroquant"


for _method, (_title, _bits, _fixed) in METHODS.items():
    _only = " only" if _method in ("paroquant", "exl3") else ""
    _about = f"{_title} by GPTQModel, {{num_bits}} bits; calibrated, minutes on a GPU{_only}"
    register(
        f"{_method}-{{num_bits}}bit", _about, num_bits=_bits, method=_method, ignore=((),), **_fixed
    )(ByGptqmodel)


def make(model: Path, out: Path, texts: Tensor, settings: ByGptqmodel | GptqByGptqmodel) -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it stops on fewer
    os.environ.setdefault("GPTQMODEL_DISABLE_PACK_EXT", "1")  # that it would compile first
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    groups = {} if settings.method == "exl3" else {"group_size": settings.group_length(0) or -1}
    config = QuantizeConfig(bits=settings.num_bits, **groups, **settings.library_options)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in texts]
    # of AWQ's kernels the others are compiled for minutes, or need a GPU
    backend = BACKEND.AWQ_TORCH if settings.method == "awq" else BACKEND.AUTO
    quantized = GPTQModel.load(str(model), config)
    size = max(1, BATCH // texts.shape[1])
    quantized.quantize(rows, batch_size=size, backend=backend)
    quantized.save(str(out))
