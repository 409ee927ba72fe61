"""Small kernels of transformers' models in one. They rotate queries and keys by their positions,
which takes five kernels of PyTorch for each of the two, normalize rows by their root mean square,
which takes eight, and multiply by gates, which takes two.

Equal to transformers' functions bit for bit, which a trial of each confirms before its first use:
each product and sum is rounded as PyTorch does, and means are added up in the order of PyTorch's
reduction. Without gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers import masking_utils
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from qbench.attention.kernels.common import Launch, layout_of
from qbench.attention.kernels.ops import MAX_LAYOUTS

TILE = 4096  # values a program takes
LLAMAS_ROTATION = modeling_llama.apply_rotary_pos_emb
LLAMAS_NORM = modeling_llama.LlamaRMSNorm.forward
LLAMAS_MLP = modeling_llama.LlamaMLP.forward
SILU = (nn.SiLU, type(ACT2FN["silu"]))


class Replacement(NamedTuple):
    """Says that ``fused`` does the same as ``original``, the attribute ``name`` of ``owner``."""

    owner: Any
    name: str
    original: Callable[..., Any]
    fused: Callable[..., Any]

    def put(self, function: Callable[..., Any]) -> None:
        """Set the owner's attribute to ``function``, one of the two."""
        setattr(self.owner, self.name, function)


# Rows hold one text each. transformers looks for more in one, and waits for the GPU to do so
FIND = "find_packed_sequence_indices"
ONE_EACH = Replacement(masking_utils, FIND, getattr(masking_utils, FIND), lambda position_ids: None)


def replacements(model: nn.Module) -> list[Replacement]:
    """Return what may be fused in ``model``, functions that are Llama's in the modules of
    transformers that define its layers, and what need not be called."""
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
        if _same_code(kind.forward, LLAMAS_MLP):
            by_owner[kind, "forward"] = Replacement(kind, "forward", kind.forward, gated_mlp)
    return [ONE_EACH, *by_owner.values()]


def _same_code(function: Any, other: Any) -> bool:
    """Return whether two functions have the same code, docstrings apart."""
    code, expected = getattr(function, "__code__", None), other.__code__
    if code is None or (code.co_code, code.co_names) != (expected.co_code, expected.co_names):
        return False
    return function is other or code.co_consts[1:] == expected.co_consts[1:]


def _run(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], *numbers: float, **constants: int
) -> None:
    """Run as many ``programs`` of ``kernel``; each product and sum in it is rounded."""
    named = (*constants.items(), ("enable_fp_fusion", False))
    layouts = map(layout_of, tensors)
    _launch(kernel, programs, numbers, named, tensors[0].device, *layouts)(*tensors)


@lru_cache(MAX_LAYOUTS)
def _launch(kernel: Any, programs: int, numbers: Any, named: Any, *_: Any) -> Launch:
    return Launch(kernel, (programs, 1), numbers, dict(named))


def _power_of_2(number: int) -> int:
    """Return the next power of two; Triton's own function takes the host 30 µs."""
    return 1 << (number - 1).bit_length()


@triton.jit(do_not_specialize=["total", "positions"])
def _rotate(
    source, cosines, sines, target, total, positions, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS of ``total`` rows of 2 · HALF values, HEADS rows for each token. Every
    ``positions`` tokens the angles begin again."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < total) & (column < HALF)
    angle = (row // HEADS % positions).to(tl.int64) * 2 * HALF + column
    at = row.to(tl.int64) * 2 * HALF + column
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
    for ``q`` and ``k`` [B, H, T, D] laid out as [B, T, H, D], with angles [1 or B, T, D]; for
    others the function itself."""
    rotated = []
    for x in (q, k):
        batch, heads, length, width = x.shape
        tokens = x.transpose(1, 2)
        alike = x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        fits = tuple(cos.shape) in ((batch, length, width), (1, length, width))
        laid_out = tokens.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        if unsqueeze_dim != 1 or not (
            alike and fits and laid_out and _rotates_as_torch(heads, width, x.dtype, x.device)
        ):
            return LLAMAS_ROTATION(q, k, cos, sin, unsqueeze_dim)
        rotated.append(_rotated(tokens, cos, sin).transpose(1, 2))
    return rotated[0], rotated[1]


def _rotated(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``tokens`` [B, T, H, D], rotated by angles [1 or B, T, D]; all are contiguous."""
    *_, heads, width = tokens.shape
    out, total = torch.empty_like(tokens), tokens.numel() // width
    block = _power_of_2(width // 2)
    rows = max(1, TILE // block)
    _run(
        _rotate, -(-total // rows), (tokens, cos, sin, out), total,
        cos.shape[0] * cos.shape[1], HEADS=heads, HALF=width // 2, BLOCK=block, ROWS=rows,
    )  # fmt: skip
    return out


@cache
def _rotates_as_torch(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel gives the bits of this release of torch, by a trial."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 37, heads + 2, width, device=device, generator=generator).to(dtype)
    tokens, (cos, sin) = x[:, :, 2:].contiguous(), x[0, :, :2].transpose(0, 1)[:, None].contiguous()
    expected = LLAMAS_ROTATION(*[tokens.transpose(1, 2)] * 2, cos, sin)[0]
    return torch.equal(_rotated(tokens, cos, sin).transpose(1, 2), expected)


@triton.jit
def _split_at_half(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Return the two halves of each row of ``x`` [ROWS, 2 · HALF]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def _sum_as_torch(sums, ROWS: tl.constexpr):
    """Return the sum of each row of ``sums`` [ROWS, 128] in the order of torch's reduction: each of
    32 threads adds its four numbers, then threads add those of threads 16, 8, 4, 2 and 1 beyond."""
    even, odd = tl.split(tl.reshape(sums, (ROWS, 32, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a, b = _split_at_half(first + second + third + fourth, ROWS, 16)
    a, b = _split_at_half(a + b, ROWS, 8)
    a, b = _split_at_half(a + b, ROWS, 4)
    a, b = _split_at_half(a + b, ROWS, 2)
    a, b = tl.split(a + b)
    return a + b


@triton.jit(do_not_specialize=["total"])
def _normalize(
    source, weights, target, total, share, epsilon, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Divide ROWS of ``total`` rows by their root mean square and multiply their columns by the
    weights. ``share``: 1 / WIDTH as torch rounds it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    sums = tl.zeros((ROWS, 128), tl.float32)
    for first in tl.range(0, WIDTH, 128, loop_unroll_factor=8):
        column = first + tl.arange(0, 128)[None, :]
        inside = (row < total) & (column < WIDTH)
        x = tl.load(source + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        sums += x * x
    mean = _sum_as_torch(sums, ROWS) * share
    factor = tl.rsqrt(mean + epsilon)[:, None]
    dtype = target.dtype.element_ty
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (row < total) & (column < WIDTH)
        x = tl.load(source + row * WIDTH + column, mask=inside).to(tl.float32)
        weight = tl.load(weights + column, mask=column < WIDTH).to(tl.float32)
        scaled = (x * factor).to(dtype).to(tl.float32) * weight
        tl.store(target + row * WIDTH + column, scaled.to(dtype), mask=inside)


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the contiguous rows ``x`` [..., H], normalized and times ``weight`` [H]."""
    width, out = x.shape[-1], torch.empty_like(x)
    total, rows = x.numel() // width, 4
    share = np.float32(total) / np.float32(x.numel())
    _run(
        _normalize, -(-total // rows), (x, weight, out), total, float(share), epsilon,
        WIDTH=width, ROWS=rows, COLUMNS=min(1024, _power_of_2(width)),
    )  # fmt: skip
    return out


@cache
def _adds_up_as_torch(width: int, device: torch.device) -> bool:
    """Return whether the kernel adds up rows of ``width`` in the order of this release of torch,
    by a trial on random rows in float32. Rows of 8,192 are divided among warps there."""
    if not 128 <= width < 8192 or width % 4:
        return False
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(1024, width, device=device, generator=generator)
    norm = SimpleNamespace(weight=torch.ones(width, device=device), variance_epsilon=1e-6)
    return torch.equal(_normalized(x, norm.weight, 1e-6), LLAMAS_NORM(norm, x))


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the result of the forward of Llama's norm in transformers, ``self``. A kernel computes
    it for contiguous ``hidden_states`` [..., H] of 16 or more rows in the dtype of the weight; for
    others, and widths that it does not add up as torch does, that forward itself."""
    x, weight = hidden_states, self.weight
    alike = x.dtype == weight.dtype and x.is_contiguous() and x.numel() >= 16 * x.shape[-1]
    if not alike or not _adds_up_as_torch(x.shape[-1], x.device):
        return LLAMAS_NORM(self, x)
    return _normalized(x, weight, self.variance_epsilon)


@triton.jit
def _gate(gates, ups, target, total, BLOCK: tl.constexpr):
    """Multiply BLOCK of ``total`` values by SiLU of their gates."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    dtype = target.dtype.element_ty
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)  # of all bfloat16 gates as PyTorch rounds it
    tl.store(target + at, (silu.to(tl.float32) * up).to(dtype), mask=inside)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU of ``gate`` times ``up``, both contiguous and of one shape."""
    out, total = torch.empty_like(up), up.numel()
    _run(_gate, -(-total // 1024), (gate, up, out), total, BLOCK=1024)
    return out


@cache
def _gates_as_torch(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel gives the bits of this release of torch for all gates in bfloat16;
    others are not tried."""
    if dtype != torch.bfloat16:
        return False
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    gate = gate[gate.isfinite()]
    return torch.equal(_gated(gate, torch.ones_like(gate)), nn.functional.silu(gate))


def gated_mlp(self: Any, x: Tensor) -> Tensor:
    """Return the result of the forward of Llama's MLP in transformers, ``self``. A kernel
    multiplies by the gates if they go through SiLU in bfloat16."""
    gate, up = self.gate_proj(x), self.up_proj(x)
    plain = type(self.act_fn) in SILU and layout_of(gate)[:3] == layout_of(up)[:3]
    if plain and gate.is_contiguous() and _gates_as_torch(gate.dtype, gate.device):
        return self.down_proj(_gated(gate, up))
    return self.down_proj(self.act_fn(gate) * up)
