"""Launch the backward kernels of :mod:`hopper_backward`, and decide for which tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qbench.attention.kernels.common import (
    CAPPED,
    CAUSAL,
    DPARAM,
    SCALED,
    SLOPED,
    WINDOWED,
    Describe,
    Launch,
    Layout,
)
from qbench.attention.kernels.configs import HOPPER_BLOCK_Q, HOPPER_STAGES
from qbench.attention.kernels.hopper_backward import hopper_bwd_dkdv, hopper_bwd_dq
from qbench.attention.normalizers import Kernels

# Batch × heads × length² × head dimension from which this is faster than the Triton kernels. With
# less, it is the launches that take the time, and these take more.
MIN_WORK = 4 * 10**9
DS = DPARAM.value | SCALED.value  # the gradient of s
TILES = {
    width: gl.NVMMASharedLayout.get_default_for([1, 1, 64, width], gl.bfloat16)
    for width in HOPPER_STAGES
}
STATS = gl.NVMMASharedLayout(0, 32, 1)


def fits(device: torch.device, query: Layout, key: Layout, value: Layout, flags: int) -> bool:
    """Return whether to use these kernels for such tensors, without mask or bounds: they support
    them, and the work is large enough (MIN_WORK) to be faster than Triton's."""
    batch, heads, length, width = query.shape
    return (
        flags & (CAUSAL.value | WINDOWED.value) == CAUSAL.value
        # The gradient of s is taken from that of the queries, where scores are products.
        and not (flags & DS == DS and flags & (CAPPED.value | SLOPED.value))
        and query.dtype == torch.bfloat16
        and width in TILES
        and width == value.shape[3]
        and length == key.shape[2]
        and length % 128 == 0
        and batch * heads * length * length * width >= MIN_WORK
        and batch * heads * length < 2**29  # counted in 32 bits, by 4
        and torch.cuda.get_device_capability(device)[0] == 9
    )


def backward_launches(
    query: Layout, key: Layout, kernels: Kernels, flags: int, scales: tuple[float, float, float],
    strides: tuple[tuple[int, ...], ...],
) -> Callable[..., None]:  # fmt: skip
    """Return the function that launches the kernels, with the arguments of
    ``ops.backward_launches``'. ``scales``: see ``hopper_bwd_dq``; ``strides``: of batch row, head
    and row, of output, dq, dk and dv."""
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    o_strides, dq_strides, dk_strides, dv_strides = strides
    dq_stages, dkdv_stages = HOPPER_STAGES[width]
    constants = {
        "NORM": kernels.score_function, "FLAGS": flags,
        "HEAD_DIM": width, "BLOCK_Q": HOPPER_BLOCK_Q[width], "num_warps": 4,
    }  # fmt: skip
    launch_dq = Launch(
        hopper_bwd_dq, (length // 128, batch * heads),
        ((heads, group, length), scales, (o_strides, dq_strides)),
        {"STAGES": dq_stages, **constants},
    )  # fmt: skip
    launches_dkdv = [
        Launch(
            hopper_bwd_dkdv, (length // 128, batch * kv_heads),
            ((kv_heads, group, length), scales, (dk_strides, dv_strides)),
            {"PRECISE": precise, "STAGES": dkdv_stages, **constants},
        )
        for precise in ((False, True) if kernels.needs_expm1 else (False,))
    ]  # fmt: skip
    q_tile, k_tile, v_tile, g_tile = (
        Describe(TensorDescriptor, (1, 1, 64, width), TILES[width]) for _ in range(4)
    )
    stats_tile = Describe(TensorDescriptor, (4 * 64,), STATS)

    def launch(
        g, q, k, v, output, lse, needs_expm1, dq, dk, dv, dparam, dsinks, dslopes, mask, seq_bounds,
        sinks, bias, slopes, s, counts,
    ):  # fmt: skip
        # For dkdv: each row's lse, 2^−lse, D, and s · log n.
        stats = lse.new_empty(4 * lse.numel())
        # Gradients that are not needed are not read: any tensor can be passed.
        dparam, dsinks, dslopes, sinks, slopes, s = (
            lse if tensor is None else tensor
            for tensor in (dparam, dsinks, dslopes, sinks, slopes, s)
        )
        sources = (q_tile(q), k_tile(k), v_tile(v), g_tile(g))
        launch_dq(*sources, output, lse, stats, dq, dparam, dsinks, dslopes, sinks, slopes, s)
        sources = (*sources, stats_tile(stats))
        for launch_dkdv in launches_dkdv:
            launch_dkdv(*sources, needs_expm1, slopes, dk, dv)

    return launch
