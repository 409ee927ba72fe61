"""Describe the formats that values are rounded to, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

WHOLE_ROW = -1


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point format: ``mantissa`` bits, smallest normal 2^``lowest``, largest value
    in [2^``highest``, 2^(``highest`` + 1)); subnormals, no infinities."""

    mantissa: int
    lowest: int
    highest: int
    largest: float


# OCP Microscaling Formats (MX) v1.0 (2023), section 5.3: E4M3 and E2M1.
ELEMENTS = {
    "e4m3": FloatFormat(mantissa=3, lowest=-6, highest=8, largest=448.0),
    "e2m1": FloatFormat(mantissa=1, lowest=0, highest=2, largest=6.0),
}
LEAST_EXPONENT = -126  # of E8M0 here: 2^−127 is a subnormal of float32, which GPUs may flush
LEAST_E4M3 = 2.0**-9  # as a scale: its smallest value above 0


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """Describes the values that a rounded number can have and which numbers share a scale, in the
    words of compressed-tensors' ``QuantizationArgs``. The audit computes the values from it.

    ``type`` int, ``symmetric``: codes −2^(num_bits−1) … 2^(num_bits−1)−1 times a scale, which is
    the largest magnitude over ``span``, as in compressed-tensors. Not ``symmetric``: codes 0 …
    2^num_bits−1 with a zero point, of a range that holds 0. ``type`` float: E4M3 of 8 bits, E2M1
    of 4, times a scale.

    ``strategy``: what shares a scale: a ``token``'s values, a ``group`` of ``group_size`` of them,
    the whole ``tensor``; ``tensor_group``: groups, under a scale of the tensor's (NVFP4).
    ``dynamic``: scales come from the values themselves; else that of the tensor is fixed before.
    ``scale_dtype``: what scales are rounded to, as torch names it."""

    num_bits: int
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["token", "group", "tensor", "tensor_group"] = "token"
    group_size: int = WHOLE_ROW
    dynamic: bool = True
    scale_dtype: Literal["float32", "float16", "float8_e4m3fn", "float8_e8m0fnu"] = "float32"

    @property
    def element(self) -> str:
        """Return the name of a code's format: ``int4``, ``e4m3``, ``e2m1``."""
        if self.type == "int":
            return f"int{self.num_bits}"
        return {8: "e4m3", 4: "e2m1"}.get(self.num_bits, "float")

    @property
    def words(self) -> str:
        """Return the format for tables: ``int4``, ``fp8 e4m3``, ``fp4 e2m1``."""
        return self.element if self.type == "int" else f"fp{self.num_bits} {self.element}"

    @property
    def sides(self) -> str:
        """Return ``, symmetric`` or ``, asymmetric``, to follow other words; "" for floats."""
        if self.type == "float":
            return ""
        return ", symmetric" if self.symmetric else ", asymmetric"

    @property
    def largest(self) -> float:
        """Return the largest code."""
        if self.type == "float":
            return ELEMENTS[self.element].largest
        return 2.0 ** (self.num_bits - 1) - 1 if self.symmetric else 2.0**self.num_bits - 1

    @property
    def smallest(self) -> float:
        """Return the smallest code."""
        if self.type == "float":
            return -self.largest
        return -(2.0 ** (self.num_bits - 1)) if self.symmetric else 0.0

    @property
    def span(self) -> float:
        """Return by what a largest magnitude (asymmetric: a range) is divided to give a scale."""
        if self.type == "float" or not self.symmetric:
            return self.largest
        return (2.0**self.num_bits - 1) / 2

    @property
    def one_of_tensor(self) -> bool:
        """Return whether one scale is taken from the whole input: then tokens change each other."""
        return self.dynamic and self.strategy.startswith("tensor")


def number(element: str) -> dict[str, Any]:
    """Return ``type`` and ``num_bits`` of a ``QuantFormat`` by name: ``int4``, ``fp8``."""
    kind = "float" if element.startswith("fp") else "int"
    return {"type": kind, "num_bits": int(element.removeprefix("fp").removeprefix("int"))}


# Numbers in blocks that share a scale of 8 bits. NVFP4: E2M1, E4M3 scales under a scale of the
# tensor (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025). MX: E2M1 or E4M3, scales
# that are powers of two, so that values beyond the largest element are clipped to it.
BLOCK_FORMATS = {
    "nvfp4": QuantFormat(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic=False,
        scale_dtype="float8_e4m3fn",
    ),
    **{
        f"mxfp{bits}": QuantFormat(
            num_bits=bits, type="float", strategy="group", group_size=32,
            scale_dtype="float8_e8m0fnu",
        )
        for bits in (4, 8)
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Holds the factor of codes, and the zero point of an asymmetric format: float32, one per group
    of values, broadcast to them, or scalars."""

    scale: Tensor
    zero: Tensor | None = None
