"""Small kernels of transformers' models in one: values are read once and written once. They rotate
queries and keys by their positions, which takes five kernels of PyTorch for each of the two, and
normalize rows by their root mean square, which takes seven beside the mean.

Equal to transformers' functions bit for bit: each product and sum is rounded as PyTorch does, and
the mean is PyTorch's own. Without gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

TILE = 4096  # values a program takes
LLAMAS_ROTATION = modeling_llama.apply_rotary_pos_emb
LLAMAS_NORM = modeling_llama.LlamaRMSNorm.forward


class Replacement(NamedTuple):
    """Says that ``fused`` does the same as ``original``, the attribute ``name`` of ``owner``."""

    owner: Any
    name: str
    original: Callable[..., Any]
    fused: Callable[..., Any]

    def put(self, function: Callable[..., Any]) -> None:
        """Set the owner's attribute to ``function``, one of the two."""
        setattr(self.owner, self.name, function)


def replacements(model: nn.Module) -> list[Replacement]:
    """Return what may be fused in ``model``: functions that are Llama's in the modules of
    transformers that define its layers."""
    by_owner = dict[tuple[Any, str], Replacement]()
    for kind in {type(module) for module in model.modules()}:
        module = sys.modules[kind.__module__]
        if _same_code(
            getattr(module, "apply_rotary_pos_emb", None), LLAMAS_ROTATION
        ) and _same_code(getattr(module, "rotate_half", None), modeling_llama.rotate_half):
            name = "apply_rotary_pos_emb"
            original = getattr(module, name)
            by_owner[module, name] = Replacement(module, name, original, apply_rotary_pos_emb)
        if _same_code(kind.forward, LLAMAS_NORM):
            by_owner[kind, "forward"] = Replacement(kind, "forward", kind.forward, rms_norm)
    return list(by_owner.values())


def _same_code(function: Any, other: Any) -> bool:
    """Return whether two functions have the same code, docstrings apart."""
    code, expected = getattr(function, "__code__", None), other.__code__
    if code is None or (code.co_code, code.co_names) != (expected.co_code, expected.co_names):
        return False
    return function is other or code.co_consts[1:] == expected.co_consts[1:]


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
    """Return the result of Llama's function of this name in transformers. The kernel computes it
    for one row of tokens, with ``q`` and ``k`` [1, H, T, D] laid out as [T, H, D]; for others the
    function itself."""
    rotated = []
    for x in (q, k):
        tokens = x.transpose(1, 2)
        alike = (
            x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape == tokens[:, :, 0].shape
        )
        laid_out = tokens.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        if unsqueeze_dim != 1 or len(x) != 1 or not (alike and laid_out):
            return LLAMAS_ROTATION(q, k, cos, sin, unsqueeze_dim)
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


@triton.jit(do_not_specialize=["total"])
def _square(source, target, total, BLOCK: tl.constexpr):
    """Write the squares of ``total`` values in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < total).to(tl.float32)
    tl.store(target + at, x * x, mask=at < total)


@triton.jit(do_not_specialize=["total"])
def _scale(
    source, factors, weights, target, total, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS of ``total`` rows by a factor each, and their columns by the weights."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < total) & (column < WIDTH)
    x = tl.load(source + row * WIDTH + column, mask=inside).to(tl.float32)
    factor = tl.load(factors + row, mask=row < total)
    weight = tl.load(weights + column, mask=column < WIDTH).to(tl.float32)
    scaled = (x * factor).to(target.dtype.element_ty).to(tl.float32) * weight
    tl.store(target + row * WIDTH + column, scaled.to(target.dtype.element_ty), mask=inside)


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the result of the forward of Llama's norm in transformers, ``self``. Kernels compute
    it for contiguous ``hidden_states`` [..., H] in the dtype of the weight; for others that
    forward itself."""
    x, weight = hidden_states, self.weight
    if x.dtype != weight.dtype or not x.is_contiguous() or not x.numel():
        return LLAMAS_NORM(self, x)
    squares = torch.empty_like(x, dtype=torch.float32)
    _square[(triton.cdiv(x.numel(), TILE),)](x, squares, x.numel(), BLOCK=TILE)
    factors = torch.rsqrt(squares.mean(-1, keepdim=True) + self.variance_epsilon)
    width, out = x.shape[-1], torch.empty_like(x)
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    _scale[(triton.cdiv(x.numel() // width, rows),)](
        x, factors, weight, out, x.numel() // width, WIDTH=width, BLOCK=block, ROWS=rows,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
