"""Round to nearest in groups: the yardstick that every method must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.names import register
from qbench.quantizers.patterns import require_whole_groups
from qbench.quantizers.quantizer import SETTINGS, Stored
from qbench.quantizers.weight_quantizer import GroupSize, WeightQuantizer, groups_of

if TYPE_CHECKING:
    from torch import nn

    from qbench.quantizers.linears import Plain, Tensors


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Rtn(WeightQuantizer):
    """Evenly spaced levels, a scale and a zero point for each group."""

    method: ClassVar[str] = "rtn"
    title: ClassVar[str] = "Round to nearest"

    bits: Literal[2, 3, 4, 8]
    group_size: GroupSize = 128
    symmetric: Annotated[
        bool, Field(description="zero point fixed in the middle; else one for each group")
    ] = False

    @property
    def scheme(self) -> str:
        return f"int{self.bits} {groups_of(self.group_size)}"

    @property
    def note(self) -> str:
        return "round to nearest"

    def shared_bits(self, rows: int, columns: int) -> float:
        return (16 + 8) / self.group_length(columns)  # a float16 scale and a zero in a byte

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        require_whole_groups(self.name, name, columns, "inputs", self.group_length(columns))

    def store(self, name: str, layer: nn.Linear) -> Tensors:
        from qbench.quantizers import packed

        weight = layer.weight.detach().float()
        groups = weight.view(layer.out_features, -1, self.group_length(layer.in_features))
        scale, zero = packed.grid(groups, self.bits, symmetric=self.symmetric)
        codes = packed.nearest(groups, scale, zero, self.bits).view_as(weight)
        return packed.tensors_of(codes, scale[..., 0], zero[..., 0], self.bits)

    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        from qbench.quantizers import packed

        size = self.group_length(shape.in_features)
        return packed.rebuild(shape, tensors, bits=self.bits, group_size=size)

    def read(self, module: nn.Module) -> Stored | None:
        from qbench.quantizers import packed

        if not isinstance(module, packed.PackedLinear):
            return None
        return packed.read(module, self.group_length(module.in_features))


for _bits in (2, 3, 4, 8):
    _line = f"round to nearest in groups, {_bits} bits: the yardstick"
    register(f"rtn-{_bits}bit", Rtn, _line, bits=_bits)
