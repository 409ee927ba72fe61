"""Triton kernels for real products: rows to codes, and int8 products with their scales.

``torch._int_mm`` leaves int32 sums behind, four bytes a number to write, read and scale: at the
widths of small models that takes longer than the product. Here scales are applied before anything
is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qbench.quantizers.products.codes import DTYPE, LARGEST, Coded

LONGEST = 65536  # columns of a row
TAKEN = 2048  # values a program encodes, unless a row is longer
Tile = tuple[int, int, int, int, int]  # rows, columns, depth, warps, stages
TILES: list[Tile] = [  # in the order of their speed on an H200 (results/bench/products-h200.md)
    (128, 128, 128, 8, 3),
    (128, 128, 64, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 64, 128, 4, 4),
]
GROUP = 8  # tiles of rows that take the same columns after one another, which stay in the cache


@triton.jit
def _encode_kernel(
    x_at, codes_at, scale_at, fixed_at, rows, columns,
    LARGEST: tl.constexpr, INT: tl.constexpr, FIXED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_at + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    # max() leaves NaN out; the sum of x · 0 does not, and inf · 0 is NaN
    broken = tl.sum(x * 0.0, axis=1)[:, None]
    if FIXED:
        scale = tl.load(fixed_at) + broken
    else:
        largest = tl.max(tl.abs(x), axis=1)[:, None] + broken
        scale = tl.div_rn(largest, largest * 0.0 + LARGEST)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    ratio = tl.div_rn(x, x * 0.0 + divisor)
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)
    if not INT:  # steps of a value are 2^(its exponent − 3), at least 2^(−6 − 3)
        exponent = ((ratio.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        step = ((tl.maximum(exponent, -6) - 3 + 127) << 23).to(tl.float32, bitcast=True)
        ratio = tl.div_rn(ratio, step)
    ratio = (ratio + 12582912.0) - 12582912.0  # 1.5 · 2²³: to whole numbers, ties to even
    if not INT:
        ratio *= step
    tl.store(codes_at + row * columns + column, ratio.to(codes_at.dtype.element_ty), mask=inside)
    tl.store(scale_at + row, scale, mask=row < rows)


def fits(x: Tensor) -> bool:
    """Whether the kernels take rows ``x`` [rows, columns]."""
    return x.is_cuda and len(x) > 0 and x.shape[1] <= LONGEST


def encode(x: Tensor, kind: str, per: str, fixed: Tensor | None = None) -> Coded:
    """As ``codes.encode``, bit for bit; rows contiguous."""
    rows, columns = x.shape
    given = fixed
    if per == "tensor" and fixed is None:
        low, high = torch.aminmax(x)
        largest = torch.maximum(-low, high).float().view(1, 1)
        given = largest / torch.full_like(largest, LARGEST[kind])
        given = torch.where(torch.isinf(given), torch.nan, given)
    codes = torch.empty(x.shape, dtype=DTYPE[kind], device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    at_once = max(1, TAKEN // block)
    _encode_kernel[(triton.cdiv(rows, at_once),)](
        x, codes, scale, scale if given is None else given, rows, columns,
        LARGEST=LARGEST[kind], INT=kind == "int8", FIXED=given is not None,
        ROWS=at_once, BLOCK=block, num_warps=min(16, max(4, at_once * block // 512)),
    )  # fmt: skip
    return codes, given if per == "tensor" and fixed is None else scale


@triton.jit
def _product_kernel(
    a_at, b_at, a_scale_at, b_scale_at, bias_at, out_at, rows, columns, depth,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs take few tiles of b, group by group of rows
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = program // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    row = (first + within % high) * ROWS + tl.arange(0, ROWS)
    column = within // high * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    a = a_at + (row % rows).to(tl.int64)[:, None] * depth + at[None, :]
    b = b_at + (column % columns).to(tl.int64)[None, :] * depth + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(0, depth, DEPTH):
        left = depth - start
        total = tl.dot(
            tl.load(a, mask=at[None, :] < left, other=0),
            tl.load(b, mask=at[:, None] < left, other=0),
            total,
            out_dtype=tl.int32,
        )
        a += DEPTH
        b += DEPTH
    value = total.to(tl.float32) * tl.load(a_scale_at + row % rows)[:, None]
    value = value * tl.load(b_scale_at + column % columns)[None, :]
    if BIAS:
        value += tl.load(bias_at + column % columns)[None, :].to(tl.float32)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    out = out_at + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, value.to(out_at.dtype.element_ty), mask=inside)


def int8_product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """codes [T, K] · weight [N, K]ᵀ, exact sums, times ``scale`` [T, 1] and ``weight_scale``
    [N, 1], plus ``bias`` [N]: ``dtype`` [T, N]. ``tile``: None for one that suits the number of
    rows."""
    rows, depth = codes.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if not rows:
        return out
    high, wide, deep, warps, stages = tile or _tile(rows, columns)
    grid = (triton.cdiv(rows, high) * triton.cdiv(columns, wide),)
    _product_kernel[grid](
        codes, weight, scale, weight_scale, out if bias is None else bias, out,
        rows, columns, depth, BIAS=bias is not None, ROWS=high, COLUMNS=wide, DEPTH=deep,
        GROUP=GROUP, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _tile(rows: int, columns: int) -> Tile:
    """The widest tile that still gives a GPU of about 132 multiprocessors two tiles each."""
    for tile in TILES:
        if triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]) >= 2 * 132:
            return tile
    return TILES[-1]
