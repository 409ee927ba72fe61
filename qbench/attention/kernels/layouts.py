"""How tensors are laid out in memory, as launches ask."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qbench.attention.kernels.settings import Parameters
from qbench.attention.normalizers import Kernels

# Read when kernels are decorated; asking again takes longer than it looks.
INTERPRETED = triton.knobs.runtime.interpret


@cache
def block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def visible_counts(
    mask: Tensor | None, query: Tensor, key: Tensor, kernels: Kernels, parameters: Parameters,
    causal: bool, window: int,
) -> Tensor | None:  # fmt: skip
    """How many keys each row may see [B, H, Tq] in float32, where a mask says so and the normalizer
    goes by it; elsewhere the kernels know."""
    wanted = kernels.scaled or (kernels.family == "sigmoid" and parameters.bias is None)
    if mask is None or not wanted:
        return None
    queries, keys = query.shape[2], key.shape[2]
    if causal or window:
        own = torch.arange(keys - queries, keys, device=mask.device)[:, None]
        other = torch.arange(keys, device=mask.device)
        if causal:
            mask = mask & (other <= own)
        if window:
            mask = mask & (other > own - window)
    counts = mask.sum(-1, dtype=torch.float32)
    return counts.expand(query.shape[0], query.shape[1], queries).contiguous()


def fused(query: Tensor) -> bool:
    """Inline assembly is for the compiler; the interpreter does without."""
    return query.dtype == torch.bfloat16 and not INTERPRETED


def dense_rows(tensor: Tensor) -> Tensor:
    """Any strides but that of a row's elements, which must lie side by side."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def strides_of(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Of batch row, head and row; those of a row's elements are 1."""
    return tuple(tensor.stride()[:3] for tensor in tensors)


def mask_strides(mask: Tensor | None) -> tuple[int, int, int, int]:
    """An axis of size one serves every batch row, or every head."""
    if mask is None:
        return 0, 0, 0, 0
    batch, head, row, column = mask.stride()
    return (batch if mask.shape[0] > 1 else 0, head if mask.shape[1] > 1 else 0, row, column)


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Of tiles of ``rows`` rows of one head."""
    return TensorDescriptor.from_tensor(tensor, [1, 1, rows, block(tensor.shape[3])])


def tma_layout(tensor: Tensor) -> bool:
    """The accelerator wants 16-byte aligned starts and strides."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()[:3]]
    return tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 and s > 0 for s in strides)
