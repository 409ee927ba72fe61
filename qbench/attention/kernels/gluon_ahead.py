"""A sweep over the keys for the queries' gradients, in which the products of the tile before and of
the tile after are under way while a tile's gradients are computed. See
:mod:`qbench.attention.kernels.gluon_queries`.
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
from qbench.attention.kernels.gluon_gradients import tile_gradients


@gluon.jit
def products_of(q, g, ring, tile):
    """Asks for a tile's scores and dP [ROWS, ROWS], queries × keys."""
    k_tiles, v_tiles, ready = ring[0], ring[1], ring[2]
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    slot = tile % stages
    mbarrier.wait(ready.index(slot), tile // stages & 1)
    s = warpgroup_mma(q, turned(k_tiles, slot), zero, use_acc=False, is_async=True)
    p = warpgroup_mma(g, turned(v_tiles, slot), zero, use_acc=False, is_async=True)
    return s, p


@gluon.jit
def ahead_step(
    dq, ds, sums, tilts, s, p, q, g, of_rows, tile, started, ring, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dq [ROWS, HEAD_DIM], asks for the next one's products, and meanwhile
    computes this one's ds [ROWS, ROWS]. Nothing is in flight when it ends."""
    k_tiles, free = ring[0], ring[3]
    stages: gl.constexpr = k_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    before = gl.where(started, tile - 1, tile) % stages
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    more_s, more_p = products_of(q, g, ring, tile + 1)
    s, p = warpgroup_mma_wait(3, [s, p])  # waits for nothing
    ds, sums, tilts = tile_gradients(
        s, p, sums, tilts, of_rows, behind, shaping, FAMILY, MODES, False
    )
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    s, p, dq = warpgroup_mma_wait(0, [more_s, more_p, dq])
    mbarrier.arrive(free.index(before), count=1, pred=started)
    return dq, ds, sums, tilts, s, p


@gluon.jit
def ahead_sweep(
    dq, sums, tilts, q, g, of_rows, first, last, skipped, ring, shaping, index,
    FAMILY: gl.constexpr, MODES: gl.constexpr,
):  # fmt: skip
    """Adds all tiles to dq [ROWS, HEAD_DIM], ``sums`` and ``tilts`` [ROWS]: ``last`` whole ones and
    the one on the diagonal, of a group whose ``first`` row is that. ``skipped``: tiles that the
    ring has had."""
    k_tiles = ring[0]
    stages: gl.constexpr = k_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    ds = gl.zeros([ROWS, ROWS], gl.bfloat16, left)
    s, p = products_of(q, g, ring, skipped)
    s, p = warpgroup_mma_wait(0, [s, p])
    if index == 1:  # an odd number of whole tiles
        dq, ds, sums, tilts, s, p = ahead_step(
            dq, ds, sums, tilts, s, p, q, g, of_rows, skipped, False, ring, first, shaping,
            FAMILY, MODES,
        )  # fmt: skip
    for two in range(index, last, 2):
        for i in gl.static_range(2):
            tile = two + i
            dq, ds, sums, tilts, s, p = ahead_step(
                dq, ds, sums, tilts, s, p, q, g, of_rows, skipped + tile, tile > 0, ring,
                first - tile * ROWS, shaping, FAMILY, MODES,
            )  # fmt: skip
    before = (skipped + gl.maximum(last - 1, 0)) % stages
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    ds, sums, tilts = tile_gradients(s, p, sums, tilts, of_rows, 0, shaping, FAMILY, MODES, True)
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    dq = warpgroup_mma(ds, flat(k_tiles, (skipped + last) % stages), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    return dq, sums, tilts
