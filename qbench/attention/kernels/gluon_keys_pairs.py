"""The sweep of :mod:`qbench.attention.kernels.gluon_keys_ahead` for heads of 128, where a slot of
the ring has two tiles of queries: half as many waits for slots, and half as many slots given back.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qbench.attention.kernels.gluon_family import ROWS, flat
from qbench.attention.kernels.gluon_weights import tile_weights, weighed_gradients


@gluon.jit
def half_of(tiles, slot, half, BLOCK_Q: gl.constexpr):
    """One of the two tiles [BLOCK_Q, HEAD_DIM] of a slot; 1: of the later queries."""
    return flat(tiles, slot).slice(half * BLOCK_Q, BLOCK_Q, dim=0)


@gluon.jit
def product_of(k, q, zero, HELD: gl.constexpr):
    """Asks for k · q [ROWS, BLOCK_Q]; ``q``: [HEAD_DIM, BLOCK_Q]. Of k half the columns are in
    registers and half in shared memory where HELD is 0.5."""
    if HELD == 0.5:
        half: gl.constexpr = q.shape[0] // 2
        early = q.slice(0, half, dim=0)
        s = warpgroup_mma(k[0], early, zero, use_acc=False, is_async=True)
        s = warpgroup_mma(k[1], q.slice(half, half, dim=0), s, is_async=True)
    else:
        s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    return s


@gluon.jit
def half_scores(k, ring, pair, half, HELD: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Asks for a tile's scores [ROWS, BLOCK_Q], keys × queries. The later queries of a pair come
    first, and are waited for."""
    q_tiles, ready = ring[0], ring[3]
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    slot = pair % stages
    if half == 1:
        mbarrier.wait(ready.index(slot), pair // stages & 1)
    q = half_of(q_tiles, slot, half, BLOCK_Q).permute([1, 0])
    return product_of(k, q, zero, HELD)


@gluon.jit
def half_step(
    dk, dv, ds, s, k, v, pair, started, ring, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr,
    HALF: gl.constexpr, HELD: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dk [ROWS, HEAD_DIM] and this one, HALF of its pair, to dv, computes
    this one's ds [ROWS, BLOCK_Q], and asks for the scores of the next, unless this is the last.
    Nothing is in flight when it ends."""
    q_tiles, g_tiles, stat_tiles, _, free = ring
    stages: gl.constexpr = q_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    last: gl.constexpr = MASKED and HALF == 0
    layout: gl.constexpr = s.type.layout
    slot = pair % stages
    before = slot
    if HALF == 1:
        before = gl.where(started, pair - 1, pair) % stages
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    dk = warpgroup_mma(ds, half_of(q_tiles, before, 1 - HALF, BLOCK_Q), dk, is_async=True)
    g = half_of(g_tiles, slot, HALF, BLOCK_Q)
    p = warpgroup_mma(v, g.permute([1, 0]), zero, use_acc=False, is_async=True)
    if not last:
        more = half_scores(k, ring, pair + (1 - HALF), 1 - HALF, HELD, BLOCK_Q)
    stat = stat_tiles.index(slot).slice(HALF * 4 * BLOCK_Q, 4 * BLOCK_Q)
    weight, of_scores = tile_weights(
        s, stat, 1 - HALF, behind, shaping, left, FAMILY, MODES, PRECISE, MASKED, BLOCK_Q
    )
    if last:
        p, dk = warpgroup_mma_wait(0, [p, dk])
    else:
        p, dk = warpgroup_mma_wait(1, [p, dk])
    if HALF == 1:
        mbarrier.arrive(free.index(before), count=1, pred=started)
    dv = warpgroup_mma(weight, g, dv, is_async=True)
    ds = weighed_gradients(
        of_scores, p, stat, 1 - HALF, shaping, FAMILY, MODES, PRECISE, MASKED, BLOCK_Q
    )
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    if last:
        dv = warpgroup_mma_wait(0, [dv])
    else:
        s, dv = warpgroup_mma_wait(0, [more, dv])
    return dk, dv, ds, s


@gluon.jit
def pairs_of_keys(
    dk, dv, k, v, pair, whole, first, length, ring, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, HELD: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Adds a head's tiles to dk and dv [ROWS, HEAD_DIM]: ``whole`` pairs and the one on the
    diagonal, of a group whose ``first`` key is that. ``pair``: that the ring has had."""
    q_tiles, free = ring[0], ring[4]
    stages: gl.constexpr = q_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    gl.static_assert(2 * BLOCK_Q == ROWS)
    ds = gl.zeros([ROWS, BLOCK_Q], gl.bfloat16, left)
    s = half_scores(k, ring, pair, 1, HELD, BLOCK_Q)
    s = warpgroup_mma_wait(0, [s])
    for n in range(whole):
        for i in gl.static_range(2):
            dk, dv, ds, s = half_step(
                dk, dv, ds, s, k, v, pair + n, n > 0, ring,
                length - (2 * n + i + 1) * BLOCK_Q - first, shaping,
                FAMILY, MODES, PRECISE, False, 1 - i, HELD, BLOCK_Q,
            )  # fmt: skip
    for i in gl.static_range(2):
        dk, dv, ds, s = half_step(
            dk, dv, ds, s, k, v, pair + whole, whole > 0, ring, (1 - i) * BLOCK_Q, shaping,
            FAMILY, MODES, PRECISE, True, 1 - i, HELD, BLOCK_Q,
        )  # fmt: skip
    slot = (pair + whole) % stages
    dk = warpgroup_mma(ds, half_of(q_tiles, slot, 0, BLOCK_Q), dk, is_async=True)
    dk = warpgroup_mma_wait(0, [dk])
    mbarrier.arrive(free.index(slot), count=1)
    return dk, dv
