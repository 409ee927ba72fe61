"""Llama's small steps as one kernel each: RMS norm, rotary embedding, SwiGLU's product.

In plain PyTorch they take more of a large batch's time on a GPU than its matrix products, since
each reads and writes the activations many times. The kernels round where PyTorch does (to the
model's dtype after each product), so that only the order of the norm's sum differs.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.models.llama import modeling_llama

ROWS = 32  # (token, head) pairs a program of the rotary kernel takes
WIDE = 2048  # elements a program of the product kernel takes


@triton.jit
def _norm_kernel(x, weight, out, width, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + epsilon)
    kind = out.dtype.element_ty
    normal = (value * scale).to(kind).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (factor * normal).to(kind), mask=inside)


@triton.jit
def _product_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    kind = out.dtype.element_ty
    value = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    active = (value / (1.0 + tl.exp(-value))).to(kind).to(tl.float32)
    other = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, (active * other).to(kind), mask=inside)


@triton.jit
def _rotary_kernel(x, cos, sin, out, rows, heads, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = row < rows
    kind = out.dtype.element_ty
    low = row * (2 * HALF) + column
    angle = (row // heads) * (2 * HALF) + column
    a = tl.load(x + low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + low + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    first = (a * cos_a).to(kind).to(tl.float32) - (b * sin_a).to(kind).to(tl.float32)
    second = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
    tl.store(out + low, first.to(kind), mask=inside)
    tl.store(out + low + HALF, second.to(kind), mask=inside)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight · x / √(mean x² + ε) over the last axis, as LlamaRMSNorm."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 256))
    _norm_kernel[(x.numel() // width,)](
        x, weight, out, width, epsilon, BLOCK=block, num_warps=warps
    )
    return out


def product(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up, elementwise."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = out.numel()
    _product_kernel[(triton.cdiv(count, WIDE),)](gate, up, out, count, BLOCK=WIDE, num_warps=8)
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [1, H, T, D] that lies in memory as [T, H, D]; cos, sin [1, T, D]."""
    _, heads, tokens, width = x.shape
    out = torch.empty((1, tokens, heads, width), dtype=x.dtype, device=x.device)
    rows = tokens * heads
    _rotary_kernel[(triton.cdiv(rows, ROWS),)](
        x, cos, sin, out, rows, heads, HALF=width // 2, BLOCK=ROWS, num_warps=4
    )
    return out.transpose(1, 2)


def fits(model: Any) -> bool:
    """Whether this is a stock Llama on CUDA, so that the kernels compute what it does."""
    config = model.config
    return (
        type(model) is modeling_llama.LlamaForCausalLM
        and model.device.type == "cuda"
        and config.hidden_act in ("silu", "swish")
        and config.head_dim & (config.head_dim - 1) == 0
        and all(p.dtype == model.dtype for n, p in model.named_parameters() if "norm" in n)
    )


@contextlib.contextmanager
def fused(model: Any) -> Iterator[bool]:
    """Within it a model that ``fits`` runs on the kernels; gives whether it does."""
    if not fits(model):
        yield False
        return
    plain = modeling_llama.apply_rotary_pos_emb
    changed = []
    for module in model.modules():
        if "forward" in vars(module):  # somebody else's hook: leave it to them
            continue
        if type(module) is modeling_llama.LlamaRMSNorm:
            module.forward = types.MethodType(_norm_forward, module)
            changed.append(module)
        elif type(module) is modeling_llama.LlamaMLP:
            module.forward = types.MethodType(_mlp_forward, module)
            changed.append(module)

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        if rest or more or not all(_in_rows(x, cos) for x in (q, k)):
            return plain(q, k, cos, sin, *rest, **more)
        cos, sin = cos.contiguous(), sin.contiguous()
        return rotary(q, cos, sin), rotary(k, cos, sin)

    modeling_llama.apply_rotary_pos_emb = apply
    try:
        yield True
    finally:
        modeling_llama.apply_rotary_pos_emb = plain
        for module in changed:
            del module.forward


def _in_rows(x: Tensor, cos: Tensor) -> bool:
    return x.shape[0] == cos.shape[0] == 1 and x.transpose(1, 2).is_contiguous() and x.is_cuda


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))
