"""Values to the nearest of what a format has, and back: the definitions, in float32.

Ties go to even. What is not finite comes out as NaN, and where a scale is taken from the values,
all that share it with them: a broken activation cannot pass for a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qbench.quantizers.config import Grid


@dataclass(frozen=True, slots=True)
class Element:
    """A floating-point format: ``mantissa`` bits, smallest normal 2^``lowest``, largest value
    ``largest`` in [2^``highest``, 2^(``highest`` + 1)); subnormals, no infinities."""

    mantissa: int
    lowest: int
    highest: int
    largest: float


# OCP Microscaling Formats (MX) v1.0 (2023), section 5.3: E4M3 and E2M1.
ELEMENTS = {
    "e4m3": Element(mantissa=3, lowest=-6, highest=8, largest=448.0),
    "e2m1": Element(mantissa=1, lowest=0, highest=2, largest=6.0),
}
LEAST_EXPONENT = -126  # of E8M0 here: 2^−127 is a subnormal of float32, which GPUs may flush
LEAST_E4M3 = 2.0**-9  # as a scale: its smallest value above 0


def rounded(
    x: Tensor, grid: Grid, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """``x`` [..., n] as ``grid`` has it, in the dtype of ``x``.

    ``scale``, and ``zero`` of an asymmetric grid: fixed, float32 scalars; else one for each n
    values. With ``e4m3`` scales (NVFP4) ``scale`` is the tensor's, under the blocks' own.
    """
    wide = x.float()
    if grid.kind == "symmetric":
        result = _symmetric(wide, grid, scale)
    elif grid.kind == "asymmetric":
        result = _asymmetric(wide, grid, scale, zero)
    else:
        result = _floats(wide, grid, scale)
    return result.to(x.dtype)


def _symmetric(x: Tensor, grid: Grid, given: Tensor | None) -> Tensor:
    """scale · clamp(round(x / scale), ±(2^(bits−1) − 1)), scale = max|x| / (2^(bits−1) − 1)."""
    most = 2 ** (int(grid.bits) - 1) - 1
    scale = over(x.abs().amax(-1, keepdim=True), most) if given is None else given
    codes = (x / _above_zero(scale)).round_().clamp_(-most, most)
    if given is not None:  # else the scale is NaN or infinite, and nothing of the row stays finite
        codes += _broken(x)
    return codes.mul_(scale)


def _asymmetric(x: Tensor, grid: Grid, scale: Tensor | None, zero: Tensor | None) -> Tensor:
    """scale · (clamp(round(x / scale) + zero, 0, 2^bits − 1) − zero) over [min(x, 0), max(x, 0)],
    zero = round(−min / scale), so that 0 stays 0."""
    steps = 2 ** int(grid.bits) - 1
    if scale is None:
        low = x.amin(-1, keepdim=True).clamp(max=0)
        scale = over(x.amax(-1, keepdim=True).clamp(min=0) - low, steps)
        zero = torch.round(-low / _above_zero(scale))
    assert zero is not None
    codes = ((x / _above_zero(scale)).round_() + zero).clamp_(0, steps)
    return (codes - zero + _broken(x)) * scale


def _floats(x: Tensor, grid: Grid, given: Tensor | None) -> Tensor:
    """scale · the element nearest to x / scale, the largest element where that is beyond it.

    ``float32`` scales: max|x| / largest. ``e8m0``: 2^(⌊log2 max|x|⌋ − highest), MX v1.0 section
    6.3. ``e4m3``: (max|x| / largest) / the tensor's scale, rounded to E4M3 (NVFP4: NVIDIA,
    "Pretraining Large Language Models with NVFP4", 2025, appendix C).
    """
    element = ELEMENTS[grid.kind]
    if grid.scale_format == "float32":
        scale = over(x.abs().amax(-1, keepdim=True), element.largest) if given is None else given
    elif grid.scale_format == "e8m0":
        scale = _power_of_two(x.abs().amax(-1, keepdim=True), element.highest)
    else:
        inner = over(x.abs().amax(-1, keepdim=True), element.largest)
        tensor = torch.ones((), device=x.device) if given is None else given
        ratio = (inner / _above_zero(tensor)).clamp(min=LEAST_E4M3)
        scale = nearest(ratio + _broken(inner), ELEMENTS["e4m3"]) * tensor
    return (nearest(x / _above_zero(scale), element) + _broken(x)) * scale


def nearest(x: Tensor, element: Element) -> Tensor:
    """The value of ``element`` nearest to ``x``, float32; saturates, NaN stays NaN."""
    step = _two_to(_exponent(x).clamp(min=element.lowest) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.largest, element.largest)


def over(x: Tensor, number: float) -> Tensor:
    """``x`` / ``number``, rounded once: by a plain number CUDA multiplies with its reciprocal."""
    return x / torch.full_like(x, number)


def _above_zero(scale: Tensor) -> Tensor:
    """What can be divided by: values that are all 0 have scale 0 and stay 0."""
    return torch.where(scale == 0, 1.0, scale)


def _broken(x: Tensor) -> Tensor:
    """0; NaN where ``x`` is not finite."""
    return x * 0


def _exponent(x: Tensor) -> Tensor:
    """⌊log2|x|⌋ of normal float32 values; −127 below them, 128 where not finite."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def _two_to(exponent: Tensor) -> Tensor:
    """2^exponent for −126 … 127."""
    return ((exponent.clamp(LEAST_EXPONENT, 127) + 127) << 23).view(torch.float32)


def _power_of_two(largest: Tensor, highest: int) -> Tensor:
    exponent = _exponent(largest)
    return _two_to(exponent - highest) + torch.where(exponent == 128, torch.nan, 0.0)
