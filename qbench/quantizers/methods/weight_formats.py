"""Settings of weights that are rounded to a number format: int8, FP8, NVFP4, MXFP4, MXFP8.

All are rounded to nearest as compressed-tensors rounds them. NVFP4 has E2M1 numbers in blocks of 16
with an E4M3 scale, under a float32 scale per matrix. MX formats have blocks of 32 with a power of
two as scale, E2M1 (MXFP4) or E4M3 (MXFP8) numbers.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from qbench.errors import QuantizationError
from qbench.quantizers.config import WeightSettings, settings
from qbench.quantizers.formats import BLOCK_FORMATS, QuantFormat
from qbench.quantizers.registry import register


@settings
class Rounded(WeightSettings):
    """Weights rounded to nearest, without calibration."""

    backend: ClassVar[str] = "scaled_linear"
    note: ClassVar[str] = "round to nearest"


@register("fp8-{per}", "fp8 e4m3, a scale per {per}; seconds", type="float", per=("row", "matrix"))
@register("int8-row", "int8, a scale per row; seconds", type="int", per="row")
@settings
class Scaled8(Rounded):
    """Codes of 8 bits times a float32 scale, so that the largest magnitude is the largest code:
    nothing is clipped. FP8 is E4M3 without infinities, largest 448 (Micikevicius et al., FP8
    formats, 2022)."""

    num_bits: ClassVar[int] = 8

    type: Literal["int", "float"]
    per: Literal["row", "matrix"]

    @property
    def method(self) -> str:
        return "int8" if self.type == "int" else "fp8"

    @property
    def title(self) -> str:
        return f"{'Int8' if self.type == 'int' else 'FP8'} weights"

    @property
    def format(self) -> QuantFormat:
        strategy: Literal["token", "tensor"] = "token" if self.per == "row" else "tensor"
        return QuantFormat(num_bits=8, type=self.type, strategy=strategy)

    @property
    def scheme(self) -> str:
        return f"{self.format.words} per {self.per}"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / columns if self.per == "row" else 32 / (rows * columns)


@register("nvfp4", "NVFP4 weights: e2m1, blocks of 16; seconds", method="nvfp4", num_bits=4)
@register("mxfp{num_bits}", "MXFP{num_bits}, blocks of 32; seconds", method="mx", num_bits=(4, 8))
@settings
class BlockFloat(Rounded):
    """Floating-point codes in blocks along a row that share a scale of 8 bits."""

    method: Literal["nvfp4", "mx"]
    num_bits: Literal[4, 8]

    @property
    def title(self) -> str:
        return f"{self.name.upper()} weights"

    @property
    def format(self) -> QuantFormat:
        return BLOCK_FORMATS[self.name]

    @property
    def block(self) -> int:
        """Return how many weights of a row share a scale."""
        return self.format.group_size

    @property
    def scheme(self) -> str:
        return f"{self.name} in blocks of {self.block}"

    def shared_bits(self, rows: int, columns: int) -> float:
        of_matrix = 32 / (rows * columns) if self.method == "nvfp4" else 0
        return 8 / self.block + of_matrix

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        if columns % self.block:
            raise QuantizationError(
                f"{self.name}: {name} has {columns} inputs, which blocks of {self.block} do not "
                f"divide; leave it out: ignore: ['{name}']"
            )
