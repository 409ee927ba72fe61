"""Count distinct values in the rows of a matrix: a Triton kernel. Rows are short, so each value is
compared with all before it; to sort the rows of a 7B model takes a GPU seconds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # values of a program


@triton.jit
def _distinct_kernel(
    values_at, most_at, rows, width, row_stride, column_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Put the largest number of distinct values in one of ROWS rows into ``most_at``, if that holds
    less. NaN differs from all."""
    row = tl.program_id(0).to(tl.int64)[None, None] * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    begin = values_at + row * row_stride
    inside = (row < rows) & (column < width)
    value = tl.load(begin + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    first = inside
    for before in range(width):
        other = tl.load(begin + before * column_stride, mask=row < rows, other=0.0).to(tl.float32)
        first = first & ((value != other) | (column <= before))
    tl.atomic_max(most_at, tl.max(tl.sum(first.to(tl.int32), axis=1), axis=0))


def most_distinct(values: Tensor) -> Tensor:
    """Return the most distinct values in a row of ``values`` [rows, width], floats of 16 or 32
    bits, a scalar int32 on their device."""
    (rows, width), most = values.shape, values.new_ones((), dtype=torch.int32)
    padded = triton.next_power_of_2(width)
    each = max(1, TILE // padded)
    _distinct_kernel[(triton.cdiv(rows, each),)](
        values, most, rows, width, values.stride(0), values.stride(1), ROWS=each, WIDTH=padded
    )
    return most
