"""GPTQ's columns of one block, one after the other, in one launch: a Triton kernel.

In PyTorch a column is fifteen launches, and one of them waits for the GPU; of a model of 340M
parameters there are 215,000 columns. gptqmodel has a kernel in CUDA, which it builds where it
finds a compiler and all headers, and falls back without a word where it does not. This one takes
its place: it rounds after every product, quotient and sum, as PyTorch does, so that results are
the same to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 128  # columns of a block: gptqmodel's
ROWS = 4  # of a program: one a warp


@triton.jit
def _columns_kernel(
    work_at, inverse_at, scale_at, zero_at, group_at, quantized_at, errors_at, losses_at,
    rows, work_stride, inverse_down, inverse_across, scale_stride, zero_stride, quantized_stride,
    errors_stride, losses_stride,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    there = row < rows
    inside = there[:, None] & (column < WIDTH)
    value = tl.load(work_at + row[:, None] * work_stride + column, mask=inside, other=0.0)
    quantized, errors, losses = value, value, value
    for pivot in range(WIDTH):
        here = column == pivot
        group = tl.load(group_at + pivot)
        scale = tl.load(scale_at + group * scale_stride + row, mask=there, other=1.0)
        zero = tl.load(zero_at + group * zero_stride + row, mask=there, other=0.0)
        diagonal = tl.load(inverse_at + pivot * (inverse_down + inverse_across))
        diagonal = tl.zeros_like(scale) + diagonal
        weight = tl.sum(tl.where(here, value, 0.0), axis=1)
        # + 1.5 · 2²³ − 1.5 · 2²³: to whole numbers, ties to even
        code = ((tl.div_rn(weight, scale) + 12582912.0) - 12582912.0) + zero
        clamped = tl.minimum(tl.maximum(code, 0.0), LARGEST)  # which leave NaN out
        kept = scale * (tl.where(code == code, clamped, code) - zero)
        residual = weight - kept
        loss = tl.div_rn(residual * residual, diagonal * diagonal)
        error = tl.div_rn(residual, diagonal)
        quantized = tl.where(here, kept[:, None], quantized)
        losses = tl.where(here, loss[:, None], losses)
        errors = tl.where(here, error[:, None], errors)
        after = inverse_at + pivot * inverse_down + column * inverse_across
        value = tl.where(column >= pivot, value - error[:, None] * tl.load(after), value)
    tl.store(work_at + row[:, None] * work_stride + column, value, mask=inside)
    tl.store(quantized_at + row[:, None] * quantized_stride + column, quantized, mask=inside)
    tl.store(errors_at + row[:, None] * errors_stride + column, errors, mask=inside)
    tl.store(losses_at + row[:, None] * losses_stride + column, losses, mask=inside)


def block_update(
    work: Tensor, inverse: Tensor, scale: Tensor, zero: Tensor, group: Tensor,
    quantized: Tensor, errors: Tensor, losses: Tensor, largest: int,
) -> None:  # fmt: skip
    """Quantize the columns of ``work`` [rows, 128], each error passed on to the columns left.

    ``inverse`` [128, 128]: the block of the Hessian's inverse's upper factor. ``scale`` and
    ``zero`` [groups, rows], of which column i takes number ``group`` [128] int32. Written in
    place: ``work``, and of each column ``quantized``, its errors over the diagonal, and their
    ``losses``, all [rows, 128]. Codes are 0 to ``largest``. All float32.
    """
    rows = work.shape[0]
    assert work.shape == quantized.shape == errors.shape == losses.shape == (rows, WIDTH)
    assert inverse.shape == (WIDTH, WIDTH)
    assert scale.shape == zero.shape == (len(scale), rows)
    assert all(t.stride(1) == 1 for t in (work, scale, zero, quantized, errors, losses))
    _columns_kernel[(triton.cdiv(rows, ROWS),)](
        work, inverse, scale, zero, group, quantized, errors, losses,
        rows, work.stride(0), *inverse.stride(), scale.stride(0), zero.stride(0),
        quantized.stride(0), errors.stride(0), losses.stride(0),
        LARGEST=float(largest), ROWS=ROWS, WIDTH=WIDTH, num_warps=ROWS,
        enable_fp_fusion=False,  # a fused product and difference would round once
    )  # fmt: skip
