"""Rotate queries and keys by their positions in one kernel: values are read once and written once,
where transformers' function takes five kernels for each of the two.

Equal to it bit for bit: products and their sum are rounded to the dtype one by one.
"""

from __future__ import annotations

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.models.llama import modeling_llama

NAMES = "apply_rotary_pos_emb", "rotate_half"  # functions of a module of transformers
LLAMAS = modeling_llama.apply_rotary_pos_emb
TILE = 4096  # values a program takes


@triton.jit(do_not_specialize=["total"])
def _rotate(
    source, cosines, sines, target, total, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS of ``total`` rows of 2 · HALF values, HEADS rows for each token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < total) & (column < HALF)
    at, angle = row * 2 * HALF + column, row // HEADS * 2 * HALF + column
    dtype = target.dtype.element_ty
    x = tl.load(source + at, mask=inside).to(tl.float32)
    y = tl.load(source + at + HALF, mask=inside).to(tl.float32)
    cos_x = tl.load(cosines + angle, mask=inside).to(tl.float32)
    cos_y = tl.load(cosines + angle + HALF, mask=inside).to(tl.float32)
    sin_x = tl.load(sines + angle, mask=inside).to(tl.float32)
    sin_y = tl.load(sines + angle + HALF, mask=inside).to(tl.float32)
    a = (x * cos_x).to(dtype).to(tl.float32) + (-y * sin_x).to(dtype).to(tl.float32)
    b = (y * cos_y).to(dtype).to(tl.float32) + (x * sin_y).to(dtype).to(tl.float32)
    tl.store(target + at, a.to(dtype), mask=inside)
    tl.store(target + at + HALF, b.to(dtype), mask=inside)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the result of Llama's function of this name in transformers, without gradients. The
    kernel computes it for one row of tokens, with ``q`` and ``k`` [1, H, T, D] laid out as
    [T, H, D]; for others the function itself."""
    rotated = []
    for x in (q, k):
        tokens = x.transpose(1, 2)
        alike = (
            x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape == tokens[:, :, 0].shape
        )
        if (
            unsqueeze_dim != 1
            or len(x) != 1
            or not (
                alike and tokens.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
            )
        ):
            return LLAMAS(q, k, cos, sin, unsqueeze_dim)
        _, count, heads, width = tokens.shape
        out = torch.empty_like(tokens)
        block = triton.next_power_of_2(width // 2)
        rows = max(1, TILE // block)
        _rotate[(triton.cdiv(count * heads, rows),)](
            tokens, cos, sin, out, count * heads, HEADS=heads, HALF=width // 2, BLOCK=block,
            ROWS=rows, enable_fp_fusion=False,
        )  # fmt: skip
        rotated.append(out.transpose(1, 2))
    return rotated[0], rotated[1]


def replaces(module: ModuleType) -> bool:
    """Return whether the functions ``NAMES`` of a module of transformers are Llama's."""

    def code(of: ModuleType, name: str) -> tuple[bytes, tuple[str, ...]] | None:
        function = getattr(getattr(of, name, None), "__code__", None)
        return function and (function.co_code, function.co_names)

    return all(code(module, n) == code(modeling_llama, n) is not None for n in NAMES)
