"""Activations as integers: evenly spaced levels, one scale a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.parts.registries import ACTIVATIONS
from qbench.quantizers.parts.settings import ActivationQuantizer
from qbench.quantizers.quantizer import SETTINGS, ActivationEvidence, Grid
from qbench.quantizers.weight_quantizer import pattern
from qbench.record import Part

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class IntToken(ActivationQuantizer):
    """One scale a token, from its own largest magnitude: nothing is clipped."""

    method: ClassVar[str] = "int"

    bits: Literal[4, 6, 8]
    leave_out: Annotated[
        tuple[Annotated[str, AfterValidator(pattern)], ...],
        Field(
            strict=False,
            description="layers whose inputs stay unquantized: parts of their names, such as "
            "down_proj, or patterns over whole names",
        ),
    ] = ()

    @property
    def name(self) -> str:
        return f"int{self.bits}-token"

    @property
    def precision(self) -> Part:
        return Part(bits=self.bits, scheme=f"int{self.bits} per token", simulated=True)

    def install(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        from qbench.quantizers.activations.inputs import install
        from qbench.quantizers.activations.rounding import symmetric

        install(model, lambda x, _: symmetric(x, self.bits), spared=self.leave_out)

    def evidence(self, model: nn.Module) -> Mapping[str, ActivationEvidence]:
        from qbench.quantizers.activations.inputs import multipliers, rows_of

        grid = Grid(kind="symmetric", bits=self.bits)
        found = ActivationEvidence(grid=grid, groups=rows_of)
        return dict.fromkeys(multipliers(model, self.leave_out), found)


for _bits in (8, 6, 4):
    ACTIVATIONS.register(
        f"int{_bits}-token", IntToken, f"int{_bits}, one scale a token", bits=_bits
    )
