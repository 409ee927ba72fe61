"""GPTQ (Frantar et al. 2022): column by column, each error passed on to the columns left."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from qbench.errors import QuantizationError
from qbench.quantizers.names import register
from qbench.quantizers.patterns import require_whole_groups
from qbench.quantizers.quantizer import SETTINGS, Made, Progress, Stored
from qbench.quantizers.weight_quantizer import (
    WHOLE_ROW,
    GroupSize,
    WeightQuantizer,
    groups_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration
    from qbench.quantizers.linears import Plain, Tensors

# Of gptqmodel: its PyTorch kernel's, and inputs and outputs of a layer, for its packing.
GROUP_SIZES = (WHOLE_ROW, 16, 32, 64, 128, 256, 512, 1024)
MULTIPLE = 32
BACKENDS = {
    "gptqmodel": ("gptq_library", ("gptqmodel", "optimum")),
    "torch": ("gptq_torch", ()),
    "auto-gptq": ("gptq_library", ("auto-gptq",)),
}


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Gptq(WeightQuantizer):
    """Through gptqmodel, or our own in PyTorch."""

    method: ClassVar[str] = "gptq"
    title: ClassVar[str] = "GPTQ"
    needs_calibration: ClassVar[bool] = True

    bits: Literal[2, 3, 4, 8]
    group_size: GroupSize = 128
    symmetric: Annotated[
        bool, Field(description="zero point fixed in the middle; else one for each group")
    ] = True
    desc_act: Annotated[
        bool, Field(description="columns in the order of falling activation size")
    ] = False
    group_aware: Annotated[
        bool,
        Field(
            description="that order within groups and among groups alone (GPTQModel's); "
            "not with desc_act"
        ),
    ] = False
    damp: Annotated[
        float,
        Field(gt=0, lt=1, description="added to the Hessian's diagonal, in units of its mean"),
    ] = 0.01
    true_sequential: Annotated[
        bool,
        Field(
            description="inside a block, each layer sees inputs that earlier layers' quantization "
            "has changed"
        ),
    ] = True
    batch_size: Annotated[
        int, Field(ge=1, le=65536, description="calibration samples in one forward")
    ] = 8
    backend: Annotated[
        Literal["gptqmodel", "torch", "auto-gptq"],
        Field(
            description="gptqmodel through optimum; our own in torch; auto-gptq, which gptqmodel "
            "has superseded"
        ),
    ] = "gptqmodel"

    @model_validator(mode="after")
    def _one_order(self) -> Gptq:
        if self.desc_act and self.group_aware:
            raise ValueError(
                "desc_act and group_aware are two orders of the same columns; set one of them"
            )
        return self

    @property
    def scheme(self) -> str:
        return f"int{self.bits} {groups_of(self.group_size)}"

    def requirements(self) -> tuple[str, ...]:
        return BACKENDS[self.backend][1]

    def require(self) -> None:
        if self.backend == "auto-gptq":
            self._backend.require_auto_gptq()

    @property
    def _backend(self) -> ModuleType:
        return importlib.import_module(f"qbench.quantizers.{BACKENDS[self.backend][0]}")

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        if self.backend == "torch":
            require_whole_groups(self.name, name, columns, "inputs", self.group_length(columns))
            return
        if self.group_size not in GROUP_SIZES:
            raise QuantizationError(
                f"{self.name}: gptqmodel has no group_size {self.group_size}; it has "
                f"{', '.join(map(str, GROUP_SIZES))}; or set backend: torch"
            )
        require_whole_groups(self.name, name, columns, "inputs", self.group_length(columns))
        for features, what in ((columns, "inputs"), (rows, "outputs")):
            if features % MULTIPLE:
                raise QuantizationError(
                    f"{self.name}: {name} has {features} {what}; gptqmodel needs multiples of "
                    f"{MULTIPLE}: set backend: torch"
                )

    def error_bound(self) -> float:
        """Twice that of rounding: GPTQ trades weight error for output error; relative errors up
        to 1.2 were seen at 2 bits, where rounding gives 0.5."""
        return 2 * super().error_bound()

    def shared_bits(self, rows: int, columns: int) -> float:
        return (16 + 8) / self.group_length(columns)  # a float16 scale and a zero

    def agreement(self, dtype: torch.dtype) -> tuple[float, float]:
        """gptqmodel multiplies codes by scales in float16, whatever the dtype."""
        on_identity, on_random = super().agreement(dtype)
        return (max(on_identity, 1e-3) if self.backend == "gptqmodel" else on_identity), on_random

    def make(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> Made:
        layers, note = self._backend.quantize(model, self, calibration, progress)
        tensors: dict[str, Any] = {
            f"{name}/{part}": tensor
            for name, parts in layers.items()
            for part, tensor in parts.items()
        }
        return Made(tensors=tensors, note=note)

    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        return self._backend.rebuild(shape, tensors, self)

    def read(self, module: nn.Module) -> Stored | None:
        return self._backend.read(module, self)


for _bits in (2, 3, 4, 8):
    register(f"gptq-{_bits}bit", Gptq, f"GPTQ, {_bits} bits, calibrated", bits=_bits)
