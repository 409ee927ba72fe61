"""Weights as int8 or fp8 codes times a float32 scale, a row's or the matrix's: round to nearest.

The formats that int8 and fp8 matrix products take in. With activations of the same format the
products can be real; without, weights are dequantized first. Imports no torch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from qbench.quantizers.config import SETTINGS, WeightSettings
from qbench.quantizers.names import register


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class ScaledWeights(WeightSettings):
    """One scale, so that the largest magnitude is the largest code: nothing is clipped."""

    codes: ClassVar[str]  # int8 or e4m3
    num_bits: Literal[8]
    per: Literal["row", "tensor"]

    @property
    def name(self) -> str:
        return f"{self.method}-{self.per}"

    @property
    def scheme(self) -> str:
        return f"{'int8' if self.codes == 'int8' else 'fp8 e4m3'} per {self.per}"

    @property
    def note(self) -> str:
        return "round to nearest"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / columns if self.per == "row" else 32 / (rows * columns)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Int8Weights(ScaledWeights):
    """Codes −127 … 127."""

    codes: ClassVar[str] = "int8"
    method: ClassVar[str] = "int8"
    title: ClassVar[str] = "Int8 weights"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Fp8Weights(ScaledWeights):
    """E4M3 without infinities, largest 448 (Micikevicius et al., FP8 formats, 2022)."""

    codes: ClassVar[str] = "e4m3"
    method: ClassVar[str] = "fp8"
    title: ClassVar[str] = "FP8 weights"


for _name, _kind, _per, _line in (
    ("int8-row", Int8Weights, "row", "int8, a scale a row: what int8 products take"),
    ("fp8-row", Fp8Weights, "row", "fp8 e4m3, a scale a row: what fp8 products take"),
    ("fp8-tensor", Fp8Weights, "tensor", "fp8 e4m3, one scale a matrix, for fp8 products"),
):
    register(_name, _kind, _line, backend="qbench.quantizers.products.layers", num_bits=8, per=_per)
