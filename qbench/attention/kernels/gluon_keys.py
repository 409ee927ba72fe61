"""Gluon kernel of the gradients of keys and values, see
:mod:`qbench.attention.kernels.gluon_backward`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qbench.attention.kernels.family import expm1_near_zero, rounded
from qbench.attention.kernels.gluon_family import (
    BLOCK,
    NO_FORMULA,
    ROWS,
    below_lse,
    exponential,
    flat,
    score_gradient,
    store_rows,
    turned,
)
from qbench.attention.kernels.modes import CAPPED, RESHAPED, SCALED
from qbench.attention.kernels.scores import cap_slope, slope_of


@gluon.jit
def key_loader(
    sources, own, ring, here, sizes, BLOCK_Q: gl.constexpr
):  # fmt: skip
    q_source, k_source, v_source, g_source, stat_source = sources
    q_tiles, g_tiles, stat_tiles, ready, free = ring
    kv_heads, group, length = sizes
    stages: gl.constexpr = q_tiles.shape[0]
    nbytes: gl.constexpr = q_source.block_type.nbytes + g_source.block_type.nbytes + 16 * BLOCK_Q
    tile = 0
    pair = gl.program_id(1)
    first = gl.program_id(0) * BLOCK
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    mbarrier.expect(here, 4 * k_source.block_type.nbytes)
    for i in gl.static_range(2):
        at = [batch, kv_head, first + i * ROWS, 0]
        tma.async_copy_global_to_shared(k_source, at, here, own.index(2 * i))
        tma.async_copy_global_to_shared(v_source, at, here, own.index(2 * i + 1))
    for member in range(group):
        row_offset = (pair * group + member) * length
        for row in range(length - BLOCK_Q, first - 1, -BLOCK_Q):
            slot = tile % stages
            mbarrier.wait(free.index(slot), (tile // stages & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, nbytes)
            at = [batch, kv_head * group + member, row, 0]
            tma.async_copy_global_to_shared(q_source, at, bar, q_tiles.index(slot))
            tma.async_copy_global_to_shared(g_source, at, bar, g_tiles.index(slot))
            tma.async_copy_global_to_shared(
                stat_source, [(row_offset + row) * 4], bar, stat_tiles.index(slot)
            )
            tile += 1


@gluon.jit
def key_step(
    dk, dv, ds, k, v, step, tile, started, ring, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dk [ROWS, HEAD_DIM] and this one to dv [ROWS, HEAD_DIM], and computes
    this tile's gradient of scores ds [ROWS, BLOCK_Q].
    The assembler moves arithmetic behind waits; it cannot move the weights behind their product.
    ``step``: of the tiles on the diagonal, counted from the last query. ``behind``: by how much the
    group's first key is behind the tile's first query. ``shaping``: what products are multiplied
    by, and before a soft cap's tanh, and the slope."""
    scale, inner, slope = shaping
    q_tiles, g_tiles, stat_tiles, ready, free = ring
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = ds.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    slot = tile % stages
    before = gl.where(started, tile - 1, tile) % stages
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    mbarrier.wait(ready.index(slot), tile // stages & 1)
    s = warpgroup_mma(k, turned(q_tiles, slot), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds, flat(q_tiles, before), dk, is_async=True)
    p = warpgroup_mma(v, turned(g_tiles, slot), zero, use_acc=False, is_async=True)
    stat = stat_tiles.index(slot)
    lse = stat.slice(0, BLOCK_Q).load(column_layout)  # [BLOCK_Q]
    s = warpgroup_mma_wait(2, [s])  # [ROWS, BLOCK_Q]: keys × queries
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_Q, layout=column_layout)
    factor = 1.0
    if SCALED & MODES:
        factor = stat.slice(3 * BLOCK_Q, BLOCK_Q).load(column_layout)[None, :]
    z, s, products = below_lse(
        s, columns[None, :], (keys - behind)[:, None], factor, scale, inner, slope, lse[None, :],
        FAMILY, MODES, True,
    )  # fmt: skip
    e = exponential(z, s, FAMILY, MODES)
    if FAMILY == "softpick":
        floor = stat.slice(BLOCK_Q, BLOCK_Q).load(column_layout)
        above = e - floor[None, :]
        if PRECISE:
            y = s
            if RESHAPED & MODES == 0:
                y = s * scale
            above = gl.where(gl.abs(y) < 0.25, floor[None, :] * expm1_near_zero(y), above)
    elif FAMILY == "softmax" or FAMILY == "rectified" or FAMILY == "sigmoid":
        above = e
    else:
        gl.static_assert(False, NO_FORMULA)
    rows = ROWS - (step + 1) * BLOCK_Q + columns
    seen = keys[:, None] <= rows[None, :]
    if MASKED:
        above = gl.where(seen, above, 0.0)
    weight = gl.convert_layout(rounded(above, gl.bfloat16, FAMILY, True), left)
    dv = warpgroup_mma(weight, flat(g_tiles, slot), dv, is_async=True)
    delta = stat.slice(2 * BLOCK_Q, BLOCK_Q).load(column_layout)
    p, dk = warpgroup_mma_wait(1, [p, dk])  # p: [ROWS, BLOCK_Q]
    mbarrier.arrive(free.index(before), count=1, pred=started)
    if SCALED & MODES:  # as D has been: a product and a difference are one instruction
        p = p * factor
    ds = score_gradient(e, s, p, delta[None, :], FAMILY)
    if CAPPED & MODES:
        ds = ds * cap_slope(products, MODES, True)
    if MASKED:
        ds = gl.where(seen, ds, 0.0)
    dv, ds = warpgroup_mma_wait(0, [dv, ds])
    return dk, dv, ds


@gluon.jit
def key_rows(
    own, ring, here, slopes, dk_out, dv_out, index, sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, HELD: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    q_tiles, ready, free = ring[0], ring[3], ring[4]
    kv_heads, group, length = sizes
    scale, score_scale, inner = scales
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    tile = 0
    pair = gl.program_id(1)
    first = gl.program_id(0) * BLOCK + index * ROWS
    mbarrier.wait(here, 0)
    k = flat(own, index * 2)
    v = flat(own, index * 2 + 1)
    if HELD > 0:
        k = k.load(left)
    if HELD > 1:
        v = v.load(left)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    whole = (length - first - ROWS) // BLOCK_Q
    for member in range(group):
        head = pair % kv_heads * group + member
        shaping = (score_scale, inner, slope_of(head, slopes, MODES))
        ds = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
        for i in range(whole):
            dk, dv, ds = key_step(
                dk, dv, ds, k, v, 0, tile, i > 0, ring,
                length - (i + 1) * BLOCK_Q - first, shaping,
                FAMILY, MODES, PRECISE, False, BLOCK_Q,
            )  # fmt: skip
            tile += 1
        for step in gl.static_range(ROWS // BLOCK_Q):
            dk, dv, ds = key_step(
                dk, dv, ds, k, v, step, tile, whole + step > 0, ring,
                ROWS - (step + 1) * BLOCK_Q, shaping,
                FAMILY, MODES, PRECISE, True, BLOCK_Q,
            )  # fmt: skip
            tile += 1
        slot = (tile - 1) % stages
        ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, sum_layout, 2))
        dk = warpgroup_mma(ds, flat(q_tiles, slot), dk, is_async=True)
        dk = warpgroup_mma_wait(0, [dk])
        mbarrier.arrive(free.index(slot), count=1)
        if index == 1:  # the other group's last tiles
            for _ in gl.static_range(ROWS // BLOCK_Q):
                mbarrier.wait(ready.index(tile % stages), tile // stages & 1)
                mbarrier.arrive(free.index(tile % stages), count=1)
                tile += 1
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    store_rows(dk_out, dk * scale, first, batch, kv_head, strides[0])
    store_rows(dv_out, dv, first, batch, kv_head, strides[1])


@gluon.jit
def key_kernel(
    q_source, k_source, v_source, g_source, stat_source, imprecise, slopes, dk_out, dv_out,
    sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, NEAR_ZERO: gl.constexpr, PRECISE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, by BLOCK_Q queries a tile. ``sizes``: key heads, how many query
    heads share one, length; ``scales`` and the ring: see the queries' kernel; ``strides``: of dk
    and dv. One launch is PRECISE and another is not; that which the forward pass's flag does not
    ask for returns at once. HELD: how many of k and v are kept in registers."""
    if NEAR_ZERO:  # noqa: SIM102 (one is known at compile time)
        if (gl.load(imprecise) != 0) != PRECISE:
            return
    own = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, ROWS, HEAD_DIM], k_source.layout)
    q_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_Q, HEAD_DIM], q_source.layout
    )
    g_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_Q, HEAD_DIM], g_source.layout
    )
    stat_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BLOCK_Q], stat_source.layout)
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    ring = (q_tiles, g_tiles, stat_tiles, ready, free)
    sources = (q_source, k_source, v_source, g_source, stat_source)
    gl.warp_specialize(
        [
            (key_rows, (own, ring, here, slopes, dk_out, dv_out, 0, sizes, scales, strides,
             FAMILY, MODES, PRECISE, HELD, BLOCK_Q)),
            (key_rows, (own, ring, here, slopes, dk_out, dv_out, 1, sizes, scales, strides,
             FAMILY, MODES, PRECISE, HELD, BLOCK_Q)),
            (key_loader, (sources, own, ring, here, sizes, BLOCK_Q)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
