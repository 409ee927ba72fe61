"""Gluon kernel of the queries' gradients, see :mod:`qbench.attention.kernels.gluon_backward`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qbench.attention.kernels.family import EPSILON, SMALL_LSE, expm1_near_zero
from qbench.attention.kernels.gluon_ahead import ahead_sweep
from qbench.attention.kernels.gluon_family import (
    BLOCK,
    ROWS,
    exp2,
    flat,
    log2_length,
    reshaped,
    sign_level,
    sloped_lse,
    store_rows,
    turned,
)
from qbench.attention.kernels.gluon_gradients import tile_gradients
from qbench.attention.kernels.modes import (
    BIASED,
    COMPARED,
    LEARNING,
    LEARNING_SLOPES,
    SCALED,
    SINK_LEARNED,
)
from qbench.attention.kernels.scores import LN_2, head_factor, sink_of, slope_of


@gluon.jit
def any_small(lse_source, WARPS: gl.constexpr):
    """Whether a row of the block, whose lse begins here, needs a sweep for its D."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.min(gl.load(lse_source + gl.arange(0, BLOCK, layout=layout)), 0) < SMALL_LSE


@gluon.jit
def load_tiles(k_source, v_source, ring, batch, kv_head, before, count):
    """Loads ``count`` tiles of keys and values into the ``ring``, which has had ``before``."""
    k_tiles, v_tiles, ready, free = ring
    stages: gl.constexpr = k_tiles.shape[0]
    for i in range(count):
        slot = (before + i) % stages
        mbarrier.wait(free.index(slot), ((before + i) // stages & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, k_source.block_type.nbytes + v_source.block_type.nbytes)
        at = [batch, kv_head, i * ROWS, 0]
        tma.async_copy_global_to_shared(k_source, at, bar, k_tiles.index(slot))
        tma.async_copy_global_to_shared(v_source, at, bar, v_tiles.index(slot))


@gluon.jit
def query_loader(
    sources, own, ring, here, lse_source, sizes, NEAR_ZERO: gl.constexpr
):  # fmt: skip
    q_source, k_source, v_source, g_source = sources
    heads, group, length = sizes
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK
    batch = pair // heads
    head = pair % heads
    mbarrier.expect(here, 4 * q_source.block_type.nbytes)
    for i in gl.static_range(2):
        at = [batch, head, first + i * ROWS, 0]
        tma.async_copy_global_to_shared(q_source, at, here, own.index(2 * i))
        tma.async_copy_global_to_shared(g_source, at, here, own.index(2 * i + 1))
    count = first // ROWS + 2
    load_tiles(k_source, v_source, ring, batch, head // group, 0, count)
    if NEAR_ZERO:
        lse_row = lse_source + pair.to(gl.int64) * length
        if any_small(lse_row + first, 1):  # that was the sweep for D
            load_tiles(k_source, v_source, ring, batch, head // group, count, count)


@gluon.jit
def delta_sweep(
    q, g, first, count, ring, factor, shaping, MODES: gl.constexpr, layout: gl.constexpr
):
    """See :func:`qbench.attention.kernels.backward_queries.delta_sweep`."""
    k_tiles, v_tiles, ready, free = ring
    stages: gl.constexpr = k_tiles.shape[0]
    scale, inner, slope = shaping
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))  # [ROWS]
    delta = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    highest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for tile in range(count):
        slot = tile % stages
        zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
        mbarrier.wait(ready.index(slot), tile // stages & 1)
        s = warpgroup_mma(q, turned(k_tiles, slot), zero, use_acc=False, is_async=True)
        p = warpgroup_mma(g, turned(v_tiles, slot), zero, use_acc=False, is_async=True)
        s, p = warpgroup_mma_wait(0, [s, p])  # [ROWS, ROWS] each: queries × keys
        mbarrier.arrive(free.index(slot), count=1)
        keys = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        y, unused = reshaped(  # noqa: RUF059 (an underscore would be carried on)
            s, rows[:, None] - first, keys[None, :] - first, factor, scale, inner, slope, MODES
        )
        y = gl.where(keys[None, :] <= rows[:, None], y, 0.0)
        above = gl.where(gl.abs(y) < 0.25, expm1_near_zero(y), exp2(y) - 1)
        delta += gl.sum(gl.maximum(above, 0.0) * p, 1)
        total += gl.sum(gl.abs(above), 1)
        highest = gl.maximum(highest, gl.max(above, 1))
    return delta / (total + EPSILON * (1 + highest))


@gluon.jit
def query_step(
    dq, ds, sums, tilts, q, g, of_rows, tile, started, ring, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dq [ROWS, HEAD_DIM], and computes this tile's gradients ds
    [ROWS, ROWS]. Other arguments: see :func:`tile_gradients`."""
    k_tiles, v_tiles, ready, free = ring
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = ds.type.layout
    slot = tile % stages
    before = gl.where(started, tile - 1, tile) % stages
    ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, dq.type.layout, 2))
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    mbarrier.wait(ready.index(slot), tile // stages & 1)
    s = warpgroup_mma(q, turned(k_tiles, slot), zero, use_acc=False, is_async=True)
    p = warpgroup_mma(g, turned(v_tiles, slot), zero, use_acc=False, is_async=True)
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    s, p, dq = warpgroup_mma_wait(0, [s, p, dq])  # s, p: [ROWS, ROWS], queries × keys
    mbarrier.arrive(free.index(before), count=1, pred=started)
    ds, sums, tilts = tile_gradients(
        s, p, sums, tilts, of_rows, behind, shaping, FAMILY, MODES, MASKED
    )
    return dq, ds, sums, tilts


@gluon.jit
def query_rows(
    own, ring, here, rows_of, of_head, sizes, scales, strides, index,
    FAMILY: gl.constexpr, MODES: gl.constexpr, NEAR_ZERO: gl.constexpr, HELD: gl.constexpr,
    BLOCK_Q: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    k_tiles = ring[0]
    heads, _, length = sizes
    scale, score_scale, inner = scales
    slope, head_scale, sink = of_head
    shaping = (score_scale, inner, slope)
    o_strides, dq_strides = strides
    o_source, lse_source, stats, dq_out, row_gradients, row_tilts = rows_of
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
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
    length_2 = log2_length(first + rows, MODES)  # [ROWS]
    factor = head_scale * length_2
    mbarrier.wait(here, 0)
    q = flat(own, index * 2)
    g = flat(own, index * 2 + 1)
    delta = gl.sum(o.to(gl.float32) * g.load(wide).to(gl.float32), 1)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, layout))
    if HELD > 0:
        q = q.load(left)
    if HELD > 1:
        g = g.load(left)
    last = first // ROWS
    skipped = 0
    if NEAR_ZERO:  # noqa: SIM102 (one is known at compile time)
        if any_small(lse_source + row_offset - index * ROWS, 4):
            skipped = last - index + 2
            exact = delta_sweep(q, g, first, skipped, ring, factor[:, None], shaping, MODES, layout)
            delta = gl.where(lse < SMALL_LSE, exact, delta)
    stat = stats + row_offset * 4 + rows // BLOCK_Q * (4 * BLOCK_Q) + rows % BLOCK_Q
    gl.store(stat, sloped_lse(lse, rows % BLOCK_Q, slope, FAMILY, MODES))
    gl.store(stat + BLOCK_Q, exp2(-lse))
    if SCALED & MODES:
        gl.store(stat + 2 * BLOCK_Q, delta * (factor * score_scale))
        gl.store(stat + 3 * BLOCK_Q, factor * score_scale)
    else:
        gl.store(stat + 2 * BLOCK_Q, delta)
        if COMPARED & MODES:
            level = (rows % BLOCK_Q).to(gl.float32) * slope
            gl.store(stat + 3 * BLOCK_Q, level + lse)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    sums = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    tilts = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    of_rows = (lse, delta, factor, sign_level(head_scale, MODES))
    if AHEAD:
        dq, sums, tilts = ahead_sweep(
            dq, sums, tilts, q, g, of_rows, first, last, skipped, ring, shaping, index,
            FAMILY, MODES,
        )  # fmt: skip
    else:
        ds = gl.zeros([ROWS, ROWS], gl.float32, layout)
        for tile in range(last):
            dq, ds, sums, tilts = query_step(
                dq, ds, sums, tilts, q, g, of_rows, skipped + tile, tile > 0, ring,
                first - tile * ROWS, shaping, FAMILY, MODES, False,
            )  # fmt: skip
        dq, ds, sums, tilts = query_step(
            dq, ds, sums, tilts, q, g, of_rows, skipped + last, last > 0, ring, 0, shaping,
            FAMILY, MODES, True,
        )  # fmt: skip
        ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, sum_layout, 2))
        dq = warpgroup_mma(ds, flat(k_tiles, (skipped + last) % stages), dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
    if SCALED & MODES:
        last_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sum_layout))
        last_length = log2_length(first + last_rows, MODES)
    if LEARNING & MODES:
        row_gradient = row_gradients + row_offset
        if SINK_LEARNED & MODES:
            gl.store(row_gradient + rows, -exp2(sink - lse) * delta)
        if BIASED & MODES:
            gl.store(row_gradient + rows, sums)
        if SCALED & MODES:  # Σ dS · score is q · dq
            product = gl.sum(flat(own, index * 2).load(sum_layout).to(gl.float32) * dq, 1)
            gl.store(row_gradient + last_rows, product * (last_length * (scale * LN_2)))
    if LEARNING_SLOPES & MODES:
        if SCALED & MODES:
            tilts = tilts * (head_scale * length_2)
        gl.store(row_tilts + row_offset + rows, tilts)
    if SCALED & MODES:
        dq = dq * (head_scale * last_length)[:, None]
    store_rows(dq_out, dq * scale, first, batch, head, dq_strides)


@gluon.jit
def query_kernel(
    q_source, k_source, v_source, g_source, o_source, lse_source, stats, dq_out, row_gradients,
    row_tilts, sinks, slopes, s, sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, NEAR_ZERO: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, BLOCK_Q: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Gradients of queries; and by BLOCK_Q of each, for the other kernel, their lse, 2^−lse, D, and
    where there is that s · log n in units of the scores, by which D is multiplied, or if COMPARED
    and there are slopes the lse with what they take from all scores of a row. ``sizes``: query
    heads, how many share a key head, length; ``scales``: of dq, in log2 units of the scores, and
    before a soft cap's tanh; ``row_gradients``, ``row_tilts``, ``sinks``, ``slopes``, ``s``: as in
    backward_queries.py; ``strides``: of batch row, head and row, of output and dq. HELD: how many
    of q and dO are kept in registers. AHEAD: see gluon_ahead.py. The ring is a pipeline's tiles in
    shared memory, with barriers that say which are ready and which are free."""
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
    rows_of = (o_source, lse_source, stats, dq_out, row_gradients, row_tilts)
    head = gl.program_id(1) % sizes[0]
    slope = slope_of(head, slopes, MODES)
    of_head = (slope, head_factor(head, s, MODES), sink_of(head, sinks, MODES))
    gl.warp_specialize(
        [
            (query_rows, (own, ring, here, rows_of, of_head, sizes, scales, strides, 0,
             FAMILY, MODES, NEAR_ZERO, HELD, BLOCK_Q, AHEAD)),
            (query_rows, (own, ring, here, rows_of, of_head, sizes, scales, strides, 1,
             FAMILY, MODES, NEAR_ZERO, HELD, BLOCK_Q, AHEAD)),
            (query_loader, (sources, own, ring, here, lse_source, sizes, NEAR_ZERO)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
