"""From an input to the quantized one: where its scale comes from, and who computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qbench.quantizers.activations import rounding
from qbench.quantizers.config import Grid

WHOLE_ROW = -1


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """A scale that does not depend on the input: float32 scalars."""

    scale: Tensor
    zero: Tensor | None = None


def by_group(x: Tensor, grid: Grid, size: int = WHOLE_ROW, fixed: Fixed | None = None) -> Tensor:
    """``x`` [..., in], one scale for every ``size`` values along the last axis."""
    groups = x if size == WHOLE_ROW else x.unflatten(-1, (-1, size))
    return _rounded(groups, grid, fixed).reshape(x.shape)


def by_tensor(x: Tensor, grid: Grid, size: int = WHOLE_ROW) -> Tensor:
    """``x``, one scale for all of it; with ``e4m3`` scales a tensor's over those of the groups."""
    if not x.numel():
        return x
    low, high = torch.aminmax(x)
    return by_group(x, grid, size, fixed_by(low, high, grid))


def fixed_by(low: Tensor, high: Tensor, grid: Grid) -> Fixed:
    """The scale of a grid whose values lie in [low, high] (scalars)."""
    low, high = low.float(), high.float()
    largest = torch.maximum(-low, high)
    if grid.kind == "symmetric":
        return Fixed(rounding.over(largest, 2 ** (int(grid.bits) - 1) - 1))
    if grid.kind == "asymmetric":
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = rounding.over(high - low, 2 ** int(grid.bits) - 1)
        return Fixed(scale, torch.round(-low / torch.where(scale == 0, 1.0, scale)))
    largest = rounding.over(largest, rounding.ELEMENTS[grid.kind].largest)
    if grid.scale_format == "e4m3":  # so that the largest block's scale is E4M3's largest value
        largest = rounding.over(largest, rounding.ELEMENTS["e4m3"].largest)
    return Fixed(largest)


def _rounded(x: Tensor, grid: Grid, fixed: Fixed | None) -> Tensor:
    given = (fixed.scale, fixed.zero) if fixed else (None, None)
    if x.is_cuda:
        from qbench.quantizers.activations import kernel  # needs Triton

        if kernel.fits(x):
            return kernel.rounded(x, grid, *given)
    return rounding.rounded(x, grid, *given)
