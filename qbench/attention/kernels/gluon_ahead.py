"""Gluon kernel of the queries' gradients of plain softmax, with ALiBi or a soft cap or neither: the
products of the tile before and of the tile after are under way while a tile's gradients are
computed. See :mod:`qbench.attention.kernels.gluon_backward`, and for the rest of it
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

from qbench.attention.kernels.gluon_family import (
    BLOCK,
    ROWS,
    below_lse,
    exp2,
    exponential,
    flat,
    score_gradient,
    sloped_lse,
    store_rows,
    turned,
)
from qbench.attention.kernels.gluon_queries import query_loader
from qbench.attention.kernels.modes import CAPPED
from qbench.attention.kernels.scores import cap_slope, slope_of


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
def gradients(
    s, p, lse, delta, behind, shaping, left: gl.constexpr,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The gradient of a tile's scores, as an operand. ``behind``: by how much its first key is
    behind the group's first query; ``shaping``: see the keys' kernel."""
    scale, inner, slope = shaping
    layout: gl.constexpr = s.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    z, s, products = below_lse(
        s, (rows + behind)[:, None], keys[None, :], 1.0, scale, inner, slope, lse[:, None],
        FAMILY, MODES,
    )  # fmt: skip
    ds = score_gradient(exponential(z, s, FAMILY, MODES), s, p, delta[:, None], FAMILY)
    if MASKED:
        ds = gl.where(keys[None, :] <= rows[:, None], ds, 0.0)
    if CAPPED & MODES:
        ds = ds * cap_slope(products, MODES, True)
    return gl.convert_layout(ds.to(gl.bfloat16), left)


@gluon.jit
def ahead_step(
    dq, ds, s, p, q, g, lse, delta, tile, ring, behind, shaping, left: gl.constexpr,
    FAMILY: gl.constexpr, MODES: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dq [ROWS, HEAD_DIM], asks for the next one's products, and meanwhile
    computes this one's ds [ROWS, ROWS]. Nothing is in flight when it ends."""
    k_tiles, free = ring[0], ring[3]
    stages: gl.constexpr = k_tiles.shape[0]
    before = gl.maximum(tile - 1, 0) % stages
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    more_s, more_p = products_of(q, g, ring, tile + 1)
    s, p = warpgroup_mma_wait(3, [s, p])  # waits for nothing
    ds = gradients(s, p, lse, delta, behind, shaping, left, FAMILY, MODES, False)
    s, p, dq = warpgroup_mma_wait(0, [more_s, more_p, dq])
    mbarrier.arrive(free.index(before), count=1, pred=tile > 0)
    return dq, ds, s, p


@gluon.jit
def ahead_rows(
    own, ring, here, rows_of, slope, sizes, scales, strides, index,
    FAMILY: gl.constexpr, MODES: gl.constexpr, HELD: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    k_tiles = ring[0]
    heads, _, length = sizes
    scale, score_scale, inner = scales
    shaping = (score_scale, inner, slope)
    o_strides, dq_strides = strides
    o_source, lse_source, stats, dq_out = rows_of
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    held: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    left: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    wide_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, wide))
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK + index * ROWS
    batch = pair // heads
    head = pair % heads
    pointers = o_source + batch.to(gl.int64) * o_strides[0] + head.to(gl.int64) * o_strides[1]
    pointers += (first + wide_rows).to(gl.int64)[:, None] * o_strides[2] + columns[None, :]
    o = gl.load(pointers)  # [ROWS, HEAD_DIM]
    row_offset = pair.to(gl.int64) * length + first
    lse = gl.load(lse_source + row_offset + rows)  # [ROWS]
    mbarrier.wait(here, 0)
    q = flat(own, index * 2)
    g = flat(own, index * 2 + 1)
    delta = gl.sum(o.to(gl.float32) * g.load(wide).to(gl.float32), 1)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, layout))
    if HELD > 0:
        q = q.load(held)
    if HELD > 1:
        g = g.load(held)
    last = first // ROWS
    stat = stats + row_offset * 4 + rows // BLOCK_Q * (4 * BLOCK_Q) + rows % BLOCK_Q
    gl.store(stat, sloped_lse(lse, rows % BLOCK_Q, slope, FAMILY, MODES))
    gl.store(stat + BLOCK_Q, exp2(-lse))
    gl.store(stat + 2 * BLOCK_Q, delta)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    ds = gl.zeros([ROWS, ROWS], gl.bfloat16, left)
    s, p = products_of(q, g, ring, 0)
    s, p = warpgroup_mma_wait(0, [s, p])
    if index == 1:  # an odd number of whole tiles
        dq, ds, s, p = ahead_step(
            dq, ds, s, p, q, g, lse, delta, 0, ring, first, shaping, left, FAMILY, MODES
        )
    for two in range(index, last, 2):
        for i in gl.static_range(2):
            dq, ds, s, p = ahead_step(
                dq, ds, s, p, q, g, lse, delta, two + i, ring, first - (two + i) * ROWS, shaping,
                left, FAMILY, MODES,
            )  # fmt: skip
    before = gl.maximum(last - 1, 0) % stages
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    ds = gradients(s, p, lse, delta, 0, shaping, left, FAMILY, MODES, True)
    dq = warpgroup_mma(ds, flat(k_tiles, last % stages), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    store_rows(dq_out, dq * scale, first, batch, head, dq_strides)


@gluon.jit
def ahead_kernel(
    q_source, k_source, v_source, g_source, o_source, lse_source, stats, dq_out, row_gradients,
    row_tilts, sinks, slopes, s, sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, NEAR_ZERO: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Arguments, and what it stores, as of :func:`gluon_queries.query_kernel`; gradients of
    parameters, sinks and scaled scores are not for it."""
    gl.static_assert(FAMILY == "softmax")
    own = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, ROWS, HEAD_DIM], q_source.layout)
    k_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, ROWS, HEAD_DIM], k_source.layout
    )
    v_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, ROWS, HEAD_DIM], v_source.layout
    )
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    ring = (k_tiles, v_tiles, ready, free)
    sources = (q_source, k_source, v_source, g_source)
    rows_of = (o_source, lse_source, stats, dq_out)
    slope = slope_of(gl.program_id(1) % sizes[0], slopes, MODES)
    gl.warp_specialize(
        [
            (ahead_rows, (own, ring, here, rows_of, slope, sizes, scales, strides, 0,
             FAMILY, MODES, HELD, BLOCK_Q)),
            (ahead_rows, (own, ring, here, rows_of, slope, sizes, scales, strides, 1,
             FAMILY, MODES, HELD, BLOCK_Q)),
            (query_loader, (sources, own, ring, here, lse_source, sizes, NEAR_ZERO)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
