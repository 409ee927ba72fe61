"""Settings of weights that are rounded to a number format, as compressed-tensors rounds them: int8,
FP8, NVFP4, MXFP4, MXFP8.

int8 and FP8 have a float32 scale, so that the largest magnitude is the largest code: nothing is
clipped. FP8 is E4M3 without infinities, largest 448 (Micikevicius et al., FP8 formats, 2022)."""

from __future__ import annotations

from typing import ClassVar

from qbench.quantizers.config import WeightSettings, settings
from qbench.quantizers.formats import BLOCK_FORMATS, WHOLE_ROW, QuantFormat
from qbench.quantizers.registry import register

FORMATS = {
    "int8-row": QuantFormat(num_bits=8),
    "fp8-row": QuantFormat(num_bits=8, type="float"),
    "fp8-matrix": QuantFormat(num_bits=8, type="float", strategy="tensor"),
    **BLOCK_FORMATS,
}


@register("nvfp4", "NVFP4 weights: e2m1, blocks of 16; seconds")
@register("mxfp8", "MXFP8, blocks of 32; seconds")
@register("mxfp4", "MXFP4, blocks of 32; seconds")
@register("fp8-matrix", "fp8 e4m3, a scale per matrix; seconds")
@register("fp8-row", "fp8 e4m3, a scale per row; seconds")
@register("int8-row", "int8, a scale per row; seconds")
@settings
class RoundedWeights(WeightSettings):
    """Weights rounded to nearest, without calibration, to the format of their name."""

    backend: ClassVar[str] = "scaled_linear"
    note: ClassVar[str] = "round to nearest"
    format = property(lambda self: FORMATS[self.name])
    family = property(lambda self: self.name.partition("-")[0])
    num_bits = property(lambda self: self.format.num_bits)
    method = property(lambda self: "mx" if self.family in ("mxfp4", "mxfp8") else self.family)
    title = property(lambda self: f"{self.family.upper().replace('INT', 'Int')} weights")
    blocks = property(lambda self: (1, max(1, self.format.group_size)))

    @property
    def scheme(self) -> str:
        """Return the scheme in the field's words: ``int8 per row``, ``nvfp4 in blocks of 16``."""
        if self.format.group_size == WHOLE_ROW:
            return f"{self.format.words} per {self.name.partition('-')[2]}"
        return f"{self.name} in blocks of {self.format.group_size}"

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight of a matrix [rows, columns] for scales of all kinds."""
        of_row = 32 / columns if self.format.strategy == "token" else 0
        of_matrix = 32 / (rows * columns) if self.format.strategy.startswith("tensor") else 0
        of_block = 0 if self.format.group_size == WHOLE_ROW else 8 / self.format.group_size
        return of_row + of_matrix + of_block
