"""A sweep over the queries of a head for the gradients of keys and values, in which the scores of
the tile after are under way while a tile's weights and gradients are computed. See
:mod:`qbench.attention.kernels.gluon_keys`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qbench.attention.kernels.gluon_family import ROWS, flat, turned
from qbench.attention.kernels.gluon_weights import tile_weights, weighed_gradients


@gluon.jit
def scores_of(k, ring, tile, BLOCK_Q: gl.constexpr):
    """Asks for a tile's scores [ROWS, BLOCK_Q], keys × queries."""
    q_tiles, ready = ring[0], ring[3]
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    mbarrier.wait(ready.index(tile % stages), tile // stages & 1)
    return warpgroup_mma(k, turned(q_tiles, tile % stages), zero, use_acc=False, is_async=True)


@gluon.jit
def ahead_step(
    dk, dv, ds, s, k, v, tile, started, ring, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dk [ROWS, HEAD_DIM] and this one to dv, computes this one's ds
    [ROWS, BLOCK_Q], and asks for the scores of the next, unless MASKED. Nothing is in flight when
    it ends."""
    q_tiles, g_tiles, stat_tiles, _, free = ring
    stages: gl.constexpr = q_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = tile % stages
    before = gl.where(started, tile - 1, tile) % stages
    layout: gl.constexpr = s.type.layout
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    p = warpgroup_mma(v, turned(g_tiles, slot), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds, flat(q_tiles, before), dk, is_async=True)
    stat = stat_tiles.index(slot)
    if MASKED:
        weight, of_scores = tile_weights(
            s, stat, 0, behind, shaping, left, FAMILY, MODES, PRECISE, True, BLOCK_Q
        )
        p, dk = warpgroup_mma_wait(0, [p, dk])
    else:
        more = scores_of(k, ring, tile + 1, BLOCK_Q)
        weight, of_scores = tile_weights(
            s, stat, 0, behind, shaping, left, FAMILY, MODES, PRECISE, False, BLOCK_Q
        )
        p, dk = warpgroup_mma_wait(1, [p, dk])
    mbarrier.arrive(free.index(before), count=1, pred=started)
    dv = warpgroup_mma(weight, flat(g_tiles, slot), dv, is_async=True)
    ds = weighed_gradients(of_scores, p, stat, 0, shaping, FAMILY, MODES, PRECISE, MASKED, BLOCK_Q)
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    if MASKED:
        dv = warpgroup_mma_wait(0, [dv])
    else:
        s, dv = warpgroup_mma_wait(0, [more, dv])
    return dk, dv, ds, s


@gluon.jit
def ahead_keys(
    dk, dv, k, v, tile, whole, first, length, ring, shaping, index,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Adds a head's tiles to dk and dv [ROWS, HEAD_DIM]: ``whole`` ones and the one on the
    diagonal, of a group whose ``first`` key is that. ``tile``: that the ring has had."""
    q_tiles, free = ring[0], ring[4]
    stages: gl.constexpr = q_tiles.shape[0]
    gl.static_assert(BLOCK_Q == ROWS)
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    ds = gl.zeros([ROWS, BLOCK_Q], gl.bfloat16, left)
    s = scores_of(k, ring, tile, BLOCK_Q)
    s = warpgroup_mma_wait(0, [s])
    if index == 0:  # an odd number of whole tiles
        dk, dv, ds, s = ahead_step(
            dk, dv, ds, s, k, v, tile, False, ring, length - BLOCK_Q - first, shaping,
            FAMILY, MODES, PRECISE, False, BLOCK_Q,
        )  # fmt: skip
    for two in range(1 - index, whole, 2):
        for i in gl.static_range(2):
            n = two + i
            dk, dv, ds, s = ahead_step(
                dk, dv, ds, s, k, v, tile + n, n > 0, ring,
                length - (n + 1) * BLOCK_Q - first, shaping, FAMILY, MODES, PRECISE, False, BLOCK_Q,
            )  # fmt: skip
    dk, dv, ds, s = ahead_step(
        dk, dv, ds, s, k, v, tile + whole, whole > 0, ring, 0, shaping,
        FAMILY, MODES, PRECISE, True, BLOCK_Q,
    )  # fmt: skip
    slot = (tile + whole) % stages
    dk = warpgroup_mma(ds, flat(q_tiles, slot), dk, is_async=True)
    dk = warpgroup_mma_wait(0, [dk])
    mbarrier.arrive(free.index(slot), count=1)
    return dk, dv
