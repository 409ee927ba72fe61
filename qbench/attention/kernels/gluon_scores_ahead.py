"""A sweep over the keys for the queries' gradients, in which the scores of the tile after are under
way while a tile's gradients are computed, and while its exponentials are what dP of the tile and
the product of the tile before take. It needs fewer registers than the one of
:mod:`qbench.attention.kernels.gluon_ahead`, in which dP of the tile after is under way too. See
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

from qbench.attention.kernels.gluon_exponentials import exponential_gradients, tile_exponentials
from qbench.attention.kernels.gluon_family import ROWS, flat, turned


@gluon.jit
def scores_of(q, ring, tile):
    """Asks for a tile's scores [ROWS, ROWS], queries × keys."""
    k_tiles, ready = ring[0], ring[2]
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    mbarrier.wait(ready.index(tile % stages), tile // stages & 1)
    return warpgroup_mma(q, turned(k_tiles, tile % stages), zero, use_acc=False, is_async=True)


@gluon.jit
def scores_step(
    dq, ds, sums, tilts, s, q, g, of_rows, tile, started, ring, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dq [ROWS, HEAD_DIM], computes this one's ds [ROWS, ROWS], and asks
    for the scores of the next, unless MASKED: if LATE when its exponentials are computed, which
    the assembler cannot move behind the wait for a tile. Nothing is in flight when it ends.
    dP after the product: the other way round it takes more registers than there are."""
    k_tiles, v_tiles, _, free = ring
    stages: gl.constexpr = k_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    layout: gl.constexpr = s.type.layout
    before = gl.where(started, tile - 1, tile) % stages
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    p = warpgroup_mma(g, turned(v_tiles, tile % stages), zero, use_acc=False, is_async=True)
    if MASKED:
        of_scores = tile_exponentials(s, of_rows, behind, shaping, FAMILY, MODES, True)
        p, dq = warpgroup_mma_wait(0, [p, dq])
    else:
        if not LATE:
            more = scores_of(q, ring, tile + 1)
        of_scores = tile_exponentials(s, of_rows, behind, shaping, FAMILY, MODES, False)
        if LATE:
            more = scores_of(q, ring, tile + 1)
        p, dq = warpgroup_mma_wait(1, [p, dq])
    mbarrier.arrive(free.index(before), count=1, pred=started)
    ds, sums, tilts = exponential_gradients(
        of_scores, p, sums, tilts, of_rows, behind, FAMILY, MODES, MASKED
    )
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    if not MASKED:
        s = warpgroup_mma_wait(0, [more])
    return dq, ds, sums, tilts, s


@gluon.jit
def scores_sweep(
    dq, sums, tilts, q, g, of_rows, first, last, skipped, ring, shaping, index,
    FAMILY: gl.constexpr, MODES: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Adds all tiles to dq [ROWS, HEAD_DIM], ``sums`` and ``tilts`` [ROWS]: ``last`` whole ones and
    the one on the diagonal, of a group whose ``first`` row is that. ``skipped``: tiles that the
    ring has had."""
    k_tiles = ring[0]
    stages: gl.constexpr = k_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    ds = gl.zeros([ROWS, ROWS], gl.bfloat16, left)
    s = scores_of(q, ring, skipped)
    s = warpgroup_mma_wait(0, [s])
    if index == 1:  # an odd number of whole tiles
        dq, ds, sums, tilts, s = scores_step(
            dq, ds, sums, tilts, s, q, g, of_rows, skipped, False, ring, first, shaping,
            FAMILY, MODES, False, LATE,
        )  # fmt: skip
    for two in range(index, last, 2):
        for i in gl.static_range(2):
            tile = two + i
            dq, ds, sums, tilts, s = scores_step(
                dq, ds, sums, tilts, s, q, g, of_rows, skipped + tile, tile > 0, ring,
                first - tile * ROWS, shaping, FAMILY, MODES, False, LATE,
            )  # fmt: skip
    dq, ds, sums, tilts, s = scores_step(
        dq, ds, sums, tilts, s, q, g, of_rows, skipped + last, last > 0, ring, 0, shaping,
        FAMILY, MODES, True, LATE,
    )  # fmt: skip
    dq = warpgroup_mma(ds, flat(k_tiles, (skipped + last) % stages), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    return dq, sums, tilts
