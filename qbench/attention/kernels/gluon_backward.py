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

from qbench.attention.kernels import modes
from qbench.attention.kernels.families import FAMILIES
from qbench.attention.kernels.gluon_ahead import ahead_kernel
from qbench.attention.kernels.gluon_keys import key_kernel
from qbench.attention.kernels.gluon_queries import query_kernel
from qbench.attention.kernels.relaunch import described, launch
from qbench.attention.kernels.settings import Parameters, factors

LEARNED_SCALE = modes.LEARNING.value | modes.SCALED.value
BENT = modes.CAPPED.value | modes.SLOPED.value

# Batch × heads × length² × head dimension from which this is faster than the Triton kernels. With
# less, it is the launches that take the time, and these take more.
ENOUGH = 4 * 10**9

# By head dimension, for each kernel: queries a tile of the keys' kernel, and then for each kernel
# the slots of its pipeline and how many of its two operands that stay are in registers. On an H200,
# both held by scores that are BENT, heads of 64: soft caps 7 % slower, ALiBi the same; none held,
# heads of 128: soft caps 3 %, ALiBi 4 % slower.
TILES = {64: (64, (4, 2), (4, 2)), 128: (32, (3, 1), (4, 1))}

# By head dimension and what is computed, bits of modes.py: slots and held operands of the queries'
# kernel of gluon_ahead.py, with which softmax's backward pass was faster on an H200, from a script
# that set it: at 4096 tokens by 3 %, with ALiBi 6 %, with soft caps 9 %; at 1024 tokens by 2, 3 and
# 6 %. Tests on a GPU and --tiles try them.
AHEAD_TRIED = {
    (64, 0): (6, 1), (64, modes.SLOPED.value): (6, 0), (64, modes.CAPPED.value): (6, 0),
}  # fmt: skip
# What is used of it: nothing before GPU tests have run over it.
AHEAD: dict[tuple[int, int], tuple[int, int]] = {}


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
    block_q, query_tile, (key_slots, held) = TILES[width]
    if asked & BENT or (near_zero and asked & modes.SCALED.value):  # they need the registers
        held = min(held, 1)
    if asked & modes.NEAR.value and width == 128:
        held = 0
    ahead = AHEAD.get((width, asked)) if family == "softmax" else None
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
        ahead_kernel if ahead else query_kernel, (length // 128, batch * heads), device,
        [*sources, output, lse, stats, dq, rows, tilts, sinks, slopes, s],
        ((heads, group, length), scales, (output.stride()[:3], dq.stride()[:3])),
        dict(zip(("STAGES", "HELD"), ahead or query_tile, strict=True)) | fixed,
    )  # fmt: skip
    if block_q != 64:
        sources[0] = described(of_rows, query, block_q)
        sources[3] = described(of_rows, gradient, block_q)
    sources.append(described(_stats_descriptor, stats, 4 * block_q))
    for precise in (False, True) if near_zero else (False,):
        launch(
            key_kernel, (length // 128, batch * kv_heads), device,
            [*sources, imprecise, slopes, dk, dv],
            ((kv_heads, group, length), scales, (dk.stride()[:3], dv.stride()[:3])),
            {"PRECISE": precise, "STAGES": key_slots, "HELD": held, **fixed},
        )  # fmt: skip


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, asked: int) -> bool:
    """Whether the kernels here are for such tensors, where there is no mask and no spans."""
    batch, heads, length, width = query.shape
    return (
        causal
        # The gradient of s is taken from that of the queries, where scores are products.
        and not (asked & LEARNED_SCALE == LEARNED_SCALE and asked & BENT)
        and window == 0
        and query.dtype == torch.bfloat16
        and width in TILES
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
