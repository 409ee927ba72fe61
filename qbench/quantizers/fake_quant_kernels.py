"""Round values as ``fake_quant`` does, in Triton, bit for bit: divisions are rounded by IEEE 754,
rounding to integers adds and subtracts 1.5 · 2²³, whose last bit is worth 1, and no product is
fused with a sum."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qbench.quantizers.formats import ELEMENTS, LEAST_E4M3, LEAST_EXPONENT, QuantFormat, Scale

TILE = 4096  # values a program takes, unless a group is longer
MAGIC = tl.constexpr(12582912.0)
SMALLEST = tl.constexpr(LEAST_EXPONENT)
SMALLEST_E4M3 = tl.constexpr(LEAST_E4M3)
FLOAT16, E8M0, E4M3 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SCALES = {"float32": 0, "float16": 1, "float8_e8m0fnu": 2, "float8_e4m3fn": 3}


@triton.jit
def _whole(x):
    """Return ``x`` rounded to a whole number, ties to even."""
    return (x + MAGIC) - MAGIC


@triton.jit
def _exponent(x):
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def _two_to(exponent):
    kept = tl.minimum(tl.maximum(exponent, SMALLEST), 127)
    return ((kept + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr):
    """Return the value of a float format nearest to ``x``."""
    exponent = tl.maximum(_exponent(x), LOWEST) - MANTISSA
    value = _whole(x * _two_to(-exponent)) * _two_to(exponent)
    kept = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    return tl.where(value == value, kept, value)


@triton.jit
def _divided(x, by):
    """Return x / by, rounded as IEEE 754 demands; a ``by`` of 0 counts as 1."""
    return tl.div_rn(x, tl.broadcast_to(tl.where(by == 0, 1.0, by), x.shape))


@triton.jit
def _stored(scale, SCALE: tl.constexpr):
    """Return ``scale`` rounded to the dtype that it is stored in."""
    if SCALE == FLOAT16:
        scale = scale.to(tl.float16).to(tl.float32)
    return scale


@triton.jit(do_not_specialize=["total"])
def _rows_kernel(
    source, target, fixed_at, zero_at, total, length,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr,
    FLOAT: tl.constexpr, SYMMETRIC: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, SPAN: tl.constexpr,
    MANTISSA: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    """Round ROWS of ``total`` groups of ``length`` values each, one after the other in memory."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < total)[:, None] & (column < length)  # [ROWS, BLOCK]
    at = row[:, None] * length + column
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    fixed = tl.zeros([ROWS, 1], tl.float32)
    zero = tl.zeros([ROWS, 1], tl.float32)
    if FIXED:
        fixed += tl.load(fixed_at)
        if not SYMMETRIC:
            zero += tl.load(zero_at)
    scale = fixed
    if not FIXED or SCALE == E4M3:  # under a fixed one, E4M3 scales are groups' own
        # max() leaves NaN out; the sum of x · 0 does not
        wrong = tl.sum(x * 0.0, 1, keep_dims=True)
        zero = wrong
        if SYMMETRIC:
            span = tl.max(tl.where(inside, tl.abs(x), 0.0), 1, keep_dims=True) + wrong
        else:
            low = tl.minimum(tl.min(tl.where(inside, x, 0.0), 1, keep_dims=True), 0.0) + wrong
            high = tl.maximum(tl.max(tl.where(inside, x, 0.0), 1, keep_dims=True), 0.0) + wrong
            span = high - low
        scale = _stored(tl.div_rn(span, tl.full(span.shape, SPAN, tl.float32)), SCALE)
        if not SYMMETRIC:
            zero = _whole(_divided(-low, scale))
        if SCALE == E8M0:
            exponent = _exponent(span)
            scale = tl.where(exponent == 128, span * 0.0, _two_to(exponent - HIGHEST))
        if SCALE == E4M3:
            if FIXED:
                scale = tl.div_rn(scale, tl.where(fixed == 0, 1.0, fixed))
            scale = tl.where(scale < SMALLEST_E4M3, SMALLEST_E4M3, scale)
            scale = _nearest(scale, 3, -6, 448.0)
            if FIXED:
                scale *= fixed
    if FLOAT:
        codes = _nearest(_divided(x, scale), MANTISSA, LOWEST, LARGEST)
    elif SYMMETRIC:
        codes = tl.minimum(tl.maximum(_whole(_divided(x, scale)), LEAST), LARGEST)
    else:
        codes = tl.minimum(tl.maximum(_whole(_divided(x, scale)) + zero, 0.0), LARGEST)
    codes += x * 0.0
    if SYMMETRIC:  # noqa: SIM108  known when it is compiled
        y = codes * scale
    else:
        y = (codes - zero) * scale
    tl.store(target + at, y.to(target.dtype.element_ty), mask=inside)


def fake_quantize_rows(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """Return the result of ``fake_quant.fake_quantize_rows`` for ``x`` [..., n] on a GPU."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    length = x.shape[-1]
    total = x.numel() // length
    block = triton.next_power_of_2(length)
    rows = max(1, TILE // block)
    scale = None if fixed is None else fixed.scale
    zero = None if fixed is None else fixed.zero
    _rows_kernel[(triton.cdiv(total, rows),)](
        x, out, scale, zero, total, length, ROWS=rows, BLOCK=block, FIXED=fixed is not None,
        num_warps=min(16, max(4, rows * block // 1024)), enable_fp_fusion=False,
        **_constants(form),
    )  # fmt: skip
    return out


@functools.cache
def _constants(form: QuantFormat) -> dict[str, Any]:
    """Return the compile-time constants of a format."""
    element = ELEMENTS.get(form.element)
    return {
        "FLOAT": form.type == "float",
        "SYMMETRIC": form.symmetric,
        "SCALE": SCALES[form.scale_dtype],
        "LARGEST": form.largest,
        "LEAST": form.smallest,
        "SPAN": form.span,
        "MANTISSA": element.mantissa if element else 0,
        "LOWEST": element.lowest if element else 0,
        "HIGHEST": element.highest if element else 0,
    }
