"""Backward pass of the plain causal bf16 case, where Hopper's tensor cores are to be kept busy.

The same two kernels as in :mod:`qbench.attention.kernels.backward_queries` and its neighbour, in
Gluon, which says which warps do what. One warp loads tiles ahead; two groups of four warps hold
64 rows each, and while one computes exponentials the tensor cores work for the other. What a tile's
scores' gradients give is computed with the next tile's scores. Operands that stay are kept in
registers where there is room: read from shared memory each time, they would take as much of its
bandwidth as there is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qbench.attention.kernels import FAMILIES, gluon_ways, modes
from qbench.attention.kernels.gluon_keys import key_kernel
from qbench.attention.kernels.gluon_queries import query_kernel
from qbench.attention.kernels.relaunch import described, launch
from qbench.attention.kernels.settings import Parameters, factors

LEARNED_SCALE = modes.LEARNING.value | modes.SCALED.value

# Batch × heads × length² × head dimension from which this is faster than the Triton kernels. With
# less, it is the launches that take the time, and these take more.
ENOUGH = 4 * 10**9


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    imprecise: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, rows: Tensor | None,
    tilts: Tensor | None, parameters: Parameters, family: str, asked: int, scale: float,
    softcap: float,
) -> None:  # fmt: skip
    """Fills dq, dk, dv and ``rows``, each row's part of the gradient of a parameter, if there is
    one, and ``tilts``, that of the slopes; for what :func:`fits` says."""
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    near_zero = FAMILIES[family].near_zero
    block_q = gluon_ways.BLOCK_Q[width]
    of_queries, of_keys = (
        dict(zip(("STAGES", "HELD", "AHEAD"), way(family, width, asked), strict=True))
        for way in (gluon_ways.of_queries, gluon_ways.of_keys)
    )
    stats = torch.empty(4 * lse.numel(), dtype=torch.float32, device=query.device)
    fixed = {
        "FAMILY": family, "MODES": asked, "NEAR_ZERO": near_zero, "HEAD_DIM": width,
        "BLOCK_Q": block_q, "num_warps": 4,
    }  # fmt: skip
    group = heads // kv_heads
    scales = (scale, *factors(scale, softcap))
    # What is not asked for is not read: any tensor stands for it.
    asked_for = (*parameters, rows, tilts)
    sinks, _, slopes, s, rows, tilts = (lse if one is None else one for one in asked_for)
    sources = [described(of_rows, tensor, 64) for tensor in (query, key, value, gradient)]
    device = query.device.index
    launch(
        query_kernel, (length // 128, batch * heads), device,
        [*sources, output, lse, stats, dq, rows, tilts, sinks, slopes, s],
        ((heads, group, length), scales, (output.stride()[:3], dq.stride()[:3])),
        of_queries | fixed,
    )  # fmt: skip
    loaded = 2 * block_q if of_keys["AHEAD"] == "pairs" else block_q
    if loaded != 64:
        sources[0] = described(of_rows, query, loaded)
        sources[3] = described(of_rows, gradient, loaded)
    sources.append(described(_stats_descriptor, stats, 4 * loaded))
    for precise in (False, True) if near_zero else (False,):
        launch(
            key_kernel, (length // 128, batch * kv_heads), device,
            [*sources, imprecise, slopes, s, dk, dv],
            ((kv_heads, group, length), scales, (dk.stride()[:3], dv.stride()[:3])),
            {"PRECISE": precise, **of_keys, **fixed},
        )  # fmt: skip


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, asked: int) -> bool:
    """Whether the kernels here are for such tensors, where there is no mask and no spans."""
    batch, heads, length, width = query.shape
    return (
        causal
        # The gradient of s is taken from that of the queries, where scores are products.
        and not (asked & LEARNED_SCALE == LEARNED_SCALE and asked & gluon_ways.BENT)
        and window == 0
        and query.dtype == torch.bfloat16
        and width in gluon_ways.BLOCK_Q
        and width == value.shape[3]
        and length == key.shape[2]
        and length % 128 == 0
        and batch * heads * length * length * width >= ENOUGH
        and batch * heads * length < 2**29  # counted in 32 bits, by 4
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


def of_rows(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Of tiles of ``rows`` rows of one head."""
    shape = [1, 1, rows, tensor.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, shape, layout)


def _stats_descriptor(stats: Tensor, numbers: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(0, 32, 1)
    return TensorDescriptor(stats, [stats.numel()], [1], [numbers], layout)
