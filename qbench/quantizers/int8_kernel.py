"""An int8 product in Triton that applies its scales before anything is written.

``torch._int_mm`` leaves int32 sums behind, four bytes a number to write, read and scale: at the
widths of small models that takes longer than the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
