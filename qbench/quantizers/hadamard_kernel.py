"""The online rotation as one Triton kernel: a token read once, written once.

A token of n = A · B values is a matrix X [A, B], and x H the matrix H_Aᵀ X H_B. Entries of both are
±1. In TF32, which holds bfloat16 and ±1 exactly, the first product is exact up to its float32 sums,
and only what passes between the two is rounded, four times as finely as bfloat16.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qbench.quantizers.hadamard import factors, matrix

WIDEST = 128  # of A and B: both matrices lie in shared memory
AT_ONCE = 8  # tokens a program takes, so that it reads the matrices once for all


@triton.jit
def _rotate_kernel(
    x_at, out_at, left_at, right_at, tokens, root,
    A: tl.constexpr, B: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, TALL)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    left = tl.load(left_at + row * TALL + tl.arange(0, TALL)[None, :])
    right = tl.load(right_at + tl.arange(0, WIDE)[:, None] * WIDE + column)
    first = tl.program_id(0).to(tl.int64) * AT_ONCE
    for one in range(AT_ONCE):
        token = first + one
        inside = (row < A) & (column < B) & (token < tokens)
        at = token * (A * B) + row * B + column
        x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.dot(x, right, input_precision=PRECISION)
        y = tl.dot(left, y, input_precision=PRECISION) / root
        tl.store(out_at + at, y.to(out_at.dtype.element_ty), mask=inside)


def fits(x: Tensor) -> bool:
    """Whether the kernel takes ``x`` [..., n]."""
    shape = split(x.shape[-1]) if x.is_cuda and x.numel() else None
    return shape is not None and _bytes(*shape) <= _shared_memory(x.device)


@functools.cache
def split(order: int) -> tuple[int, int] | None:
    """A and B of an ``order`` that the kernel takes: Paley's matrix and the power of two, or two
    powers of two; None where one is too wide."""
    parts = factors(order)
    if parts is None:
        return None
    tall = parts[0]
    if order & (order - 1) == 0:
        tall = 1 << (order.bit_length() // 2)
    return (tall, order // tall) if max(tall, order // tall) <= WIDEST else None


def hadamard_transform(x: Tensor) -> Tensor:
    """As ``rotation.hadamard_transform``."""
    order = x.shape[-1]
    shape = split(order)
    assert shape is not None
    x = x.contiguous()
    out, tokens = torch.empty_like(x), x.numel() // order
    left, right = _matrices(order, x.device)
    _rotate_kernel[(triton.cdiv(tokens, AT_ONCE),)](
        x, out, left, right, tokens, order**0.5,
        A=shape[0], B=shape[1], TALL=len(left), WIDE=len(right), AT_ONCE=AT_ONCE,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out


def _bytes(*shape: int) -> int:
    """Of both matrices, a token and what passes between the products."""
    tall, wide = map(_padded_to, shape)
    return 4 * (tall**2 + wide**2 + 2 * tall * wide)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    about = torch.cuda.get_device_properties(device)
    return getattr(about, "shared_memory_per_block_optin", about.shared_memory_per_block)


@functools.cache
def _matrices(order: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """H_Aᵀ and H_B, zeros around them up to powers of two that hardware multiplies."""
    shape = split(order)
    assert shape is not None
    tall, wide = (torch.from_numpy(matrix(n)).to(device, torch.float32) for n in shape)
    return _padded(tall.T), _padded(wide)


def _padded(rows: Tensor) -> Tensor:
    missing = _padded_to(len(rows)) - len(rows)
    return torch.nn.functional.pad(rows, (0, missing, 0, missing)).contiguous()


def _padded_to(length: int) -> int:
    return max(16, triton.next_power_of_2(length))
