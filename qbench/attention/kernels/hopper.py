"""The backward pass by the kernels of :mod:`qbench.attention.kernels.hopper_backward`: for which
tensors, and how they are launched."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qbench.attention.kernels.common import CAPPED, DPARAM, SCALED, SLOPED, descriptor, launch
from qbench.attention.kernels.configs import HOPPER
from qbench.attention.kernels.hopper_backward import hopper_bwd_dkdv, hopper_bwd_dq
from qbench.attention.normalizers import Kernels

# Batch × heads × length² × head dimension from which this is faster than the Triton kernels. With
# less, it is the launches that take the time, and these take more.
MIN_WORK = 4 * 10**9
DS = DPARAM.value | SCALED.value  # the gradient of s
TILES = {
    width: gl.NVMMASharedLayout.get_default_for([1, 1, 64, width], gl.bfloat16) for width in HOPPER
}
STATS = gl.NVMMASharedLayout(0, 32, 1)


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, flags: int) -> bool:
    """Whether the kernels are for such tensors, where there is no mask and no spans."""
    batch, heads, length, width = query.shape
    return (
        causal
        # The gradient of s is taken from that of the queries, where scores are products.
        and not (flags & DS == DS and flags & (CAPPED.value | SLOPED.value))
        and window == 0
        and query.dtype == torch.bfloat16
        and width in HOPPER
        and width == value.shape[3]
        and length == key.shape[2]
        and length % 128 == 0
        and batch * heads * length * length * width >= MIN_WORK
        and batch * heads * length < 2**29  # counted in 32 bits, by 4
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    needs_expm1: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, rows: list[Tensor | None],
    parameters: tuple[Tensor | None, ...], kernels: Kernels, flags: int,
    scales: tuple[float, float, float],
) -> None:  # fmt: skip
    """Fills dq, dk, dv and ``rows``, each row's part of the gradients of a parameter, of sinks and
    of slopes, where these are asked for."""
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    config = HOPPER[width]
    # For dkdv: each row's lse, 2^−lse, D, and s · log n or the lse with what slopes take.
    stats = torch.empty(4 * lse.numel(), dtype=torch.float32, device=query.device)
    # What is not asked for is not read: any tensor stands for it.
    sinks, _, slopes, s = (lse if one is None else one for one in parameters)
    rows = [lse if one is None else one for one in rows]
    tile = (1, 1, 64, width)
    sources = [
        descriptor(TensorDescriptor, one, tile, TILES[width])
        for one in (query, key, value, gradient)
    ]
    common = {
        "NORM": kernels.score_function, "FLAGS": flags, "NEEDS_EXPM1": kernels.needs_expm1,
        "HEAD_DIM": width, "BLOCK_Q": config.block_q, "num_warps": 4,
    }  # fmt: skip
    launch(
        hopper_bwd_dq, (length // 128, batch * heads), query.device,
        [*sources, output, lse, stats, dq, *rows, sinks, slopes, s],
        ((heads, group, length), scales, (output.stride()[:3], dq.stride()[:3])),
        {"STAGES": config.dq_stages, **common},
    )  # fmt: skip
    sources.append(descriptor(TensorDescriptor, stats, (4 * 64,), STATS))
    for precise in (False, True) if kernels.needs_expm1 else (False,):
        launch(
            hopper_bwd_dkdv, (length // 128, batch * kv_heads), query.device,
            [*sources, needs_expm1, slopes, s, dk, dv],
            ((kv_heads, group, length), scales, (dk.stride()[:3], dv.stride()[:3])),
            {"PRECISE": precise, "STAGES": config.dkdv_stages, **common},
        )  # fmt: skip
