"""Tensors that the forward pass fills."""

from __future__ import annotations

import torch
from torch import Tensor

from qbench.attention import kernels as families
from qbench.attention.kernels.family import CHUNK


def empty_output(query: Tensor, value: Tensor, *, covered: bool) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, Dv], laid out as [B, Tq, H, Dv], and the rows' log-sum-exp in
    log2 units [B, H, Tq] in float32. Where sequences need not cover every row, rows outside them
    are 0 and their lse is +∞."""
    batch, heads, queries, _ = query.shape
    shape = (batch, queries, heads, value.shape[3])
    if covered:
        output = query.new_empty(shape)
        lse = query.new_empty((batch, heads, queries), dtype=torch.float32)
    else:
        output = query.new_zeros(shape)
        lse = query.new_full((batch, heads, queries), float("inf"), dtype=torch.float32)
    return output.transpose(1, 2), lse


def empty_flags(query: Tensor, key: Tensor, normalizer: str) -> Tensor:
    """Flags, int32 zeros [B, key heads, chunks of CHUNK keys], that the forward pass sets where a
    row of tiny scores has a positive one; [1], not filled, where the normalizer needs none."""
    kernels = families.require(normalizer)
    if not families.FAMILIES[kernels.family].near_zero:
        return query.new_empty(1, dtype=torch.int32)
    shape = (*key.shape[:2], -(-key.shape[2] // CHUNK.value))
    return query.new_zeros(shape, dtype=torch.int32)
