"""Half-quadratic quantization (Badri & Shaji 2023): zero points fitted, no calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.names import register
from qbench.quantizers.patterns import require_whole_groups
from qbench.quantizers.quantizer import SETTINGS, Stored
from qbench.quantizers.weight_quantizer import WIDEST, WeightQuantizer

if TYPE_CHECKING:
    from torch import nn

    from qbench.quantizers.linears import Plain, Tensors


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Hqq(WeightQuantizer):
    """Through the hqq library. Zeros are whole numbers at 4 bits alone, as the library has it."""

    method: ClassVar[str] = "hqq"
    title: ClassVar[str] = "HQQ"

    bits: Literal[2, 3, 4, 8]
    group_size: Annotated[
        int,
        Field(
            ge=8,
            le=WIDEST,
            description="weights that share a scale and a zero along `axis`; a multiple of 8",
        ),
    ] = 64
    axis: Annotated[
        Literal[0, 1], Field(description="1: groups along a row; 0: groups across rows")
    ] = 1
    optimize: Annotated[
        bool, Field(description="fit the zero points; without it, plain rounding")
    ] = True

    @property
    def scheme(self) -> str:
        return f"int{self.bits} in groups of {self.group_size}" + (
            "" if self.axis == 1 else " across rows"
        )

    def requirements(self) -> tuple[str, ...]:
        return ("hqq",)

    def shared_bits(self, rows: int, columns: int) -> float:
        wide = 32 if self.compute_dtype == "float32" else 16  # of a scale, and of a zero
        padding = 0.2 if self.bits == 3 else 0  # ten codes in 32 bits
        return 2 * wide / self.group_size + padding

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        features, what = (columns, "inputs") if self.axis else (rows, "outputs")
        require_whole_groups(self.name, name, features, what, self.group_size)

    def store(self, name: str, layer: nn.Linear) -> Tensors:
        from qbench.quantizers import hqq_layers

        return hqq_layers.store(name, layer, self)

    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        from qbench.quantizers import hqq_layers

        return hqq_layers.rebuild(shape, tensors, self)

    def read(self, module: nn.Module) -> Stored | None:
        from qbench.quantizers import hqq_layers

        return hqq_layers.read(module, self)


for _bits in (2, 3, 4, 8):
    _line = f"half-quadratic quantization, {_bits} bits, no calibration"
    register(f"hqq-{_bits}bit", Hqq, _line, bits=_bits)
