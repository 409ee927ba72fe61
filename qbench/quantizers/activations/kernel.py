"""``rounding.rounded`` as one Triton kernel: read once, written once.

Equal to the definitions bit for bit: divisions are rounded as IEEE 754 has it, and rounding to
whole numbers adds and takes off 1.5 · 2²³, whose last bit is worth 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qbench.quantizers.activations.rounding import ELEMENTS, LEAST_E4M3, LEAST_EXPONENT
from qbench.quantizers.config import Grid

TILE = 4096  # values a program takes, unless a group is longer
LONGEST = 65536  # values in a group
SYMMETRIC, ASYMMETRIC, FLOAT = 0, 1, 2
FLOAT32, E8M0, E4M3 = 0, 1, 2


@triton.jit
def _whole(x):
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _exponent(x):
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def _two_to(exponent, LEAST: tl.constexpr):
    kept = tl.minimum(tl.maximum(exponent, LEAST), 127)
    return ((kept + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(
    x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr
):
    step = _two_to(tl.maximum(_exponent(x), LOWEST) - MANTISSA, LEAST)
    value = _whole(tl.div_rn(x, step)) * step
    kept = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    return tl.where(value == value, kept, value)


@triton.jit
def _round_kernel(
    x_at, out_at, scale_at, zero_at, groups, length,
    KIND: tl.constexpr, SCALE: tl.constexpr, GIVEN: tl.constexpr, MOST: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    LEAST: tl.constexpr, LEAST_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < groups) & (column < length)
    at = row * length + column
    x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
    broken = x * 0.0
    if GIVEN and SCALE != 2:
        scale = tl.load(scale_at)
        zero = scale * 0.0
        if KIND == 1:
            zero = tl.load(zero_at)
    else:
        # max() leaves NaN out; the sum of x · 0 does not
        wrong = tl.sum(broken, axis=1)[:, None]
        zero = wrong
        if KIND == 1:
            low = tl.minimum(tl.min(x, axis=1), 0.0)[:, None] + wrong
            high = tl.maximum(tl.max(x, axis=1), 0.0)[:, None] + wrong
            scale = tl.div_rn(high - low, high * 0.0 + MOST)
            zero = _whole(tl.div_rn(-low, tl.where(scale == 0, 1.0, scale)))
        else:
            largest = tl.max(tl.abs(x), axis=1)[:, None] + wrong
            scale = tl.div_rn(largest, largest * 0.0 + MOST)
            if SCALE == 1:
                exponent = _exponent(largest)
                scale = _two_to(exponent - HIGHEST, LEAST)
                scale = tl.where(exponent == 128, largest * 0.0, scale)
            if SCALE == 2:
                tensor = 1.0
                if GIVEN:
                    tensor = tl.load(scale_at)
                    under = scale * 0.0 + tl.where(tensor == 0, 1.0, tensor)
                    scale = tl.div_rn(scale, under)
                scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
                scale = _nearest(scale, 3, -6, 448.0, LEAST) * tensor
    ratio = tl.div_rn(x, broken * 0.0 + tl.where(scale == 0, 1.0, scale))
    if KIND == 2:
        codes = _nearest(ratio, MANTISSA, LOWEST, MOST, LEAST)
    elif KIND == 1:
        codes = tl.minimum(tl.maximum(_whole(ratio) + zero, 0.0), MOST) - zero
    else:
        codes = tl.minimum(tl.maximum(_whole(ratio), -MOST), MOST)
    value = (codes + broken) * scale
    tl.store(out_at + at, value.to(out_at.dtype.element_ty), mask=inside)


def fits(x: Tensor) -> bool:
    """Whether the kernel takes ``x`` [..., n], one group a row."""
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return x.is_cuda and known and x.shape[-1] <= LONGEST


def rounded(
    x: Tensor, grid: Grid, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """As ``rounding.rounded``."""
    x = x.contiguous()
    out, length = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return out
    constants = _constants(grid, length, scale is not None)
    rows = constants["ROWS"]
    _round_kernel[(triton.cdiv(x.numel() // length, rows),)](
        x, out, x if scale is None else scale, x if zero is None else zero, x.numel() // length,
        length, **constants,
    )  # fmt: skip
    return out


@functools.cache
def _constants(grid: Grid, length: int, given: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    block = triton.next_power_of_2(length)
    rows = max(1, TILE // block)
    element = ELEMENTS.get(grid.kind)
    bits = int(grid.bits)
    if element is not None:
        most = element.largest
    else:
        most = 2**bits - 1 if grid.kind == "asymmetric" else 2 ** (bits - 1) - 1
    return {
        "KIND": {"symmetric": SYMMETRIC, "asymmetric": ASYMMETRIC}.get(grid.kind, FLOAT),
        "SCALE": {"float32": FLOAT32, "e8m0": E8M0, "e4m3": E4M3}[grid.scale_format],
        "GIVEN": given,
        "MOST": float(most),
        "MANTISSA": element.mantissa if element else 0,
        "LOWEST": element.lowest if element else 0,
        "HIGHEST": element.highest if element else 0,
        "LEAST": LEAST_EXPONENT,
        "LEAST_SCALE": LEAST_E4M3,
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": min(16, max(4, rows * block // 1024)),
    }
