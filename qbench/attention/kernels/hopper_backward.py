"""Backward pass of the plain causal bf16 case in Gluon, which keeps Hopper's tensor cores busy: the
same two kernels as in :mod:`qbench.attention.kernels.backward`.

Gluon says which warps do what. One warp loads tiles ahead into a ring of buffers in shared memory,
with barriers that say which are full and which are empty; two groups of four warps hold 64 rows
each, and while one computes exponentials the tensor cores work for the other. What a tile's scores'
gradients give is computed with the next tile's scores. Operands that stay are kept in registers
where there is room, to spare the bandwidth of shared memory.

``fixed`` are a block's tiles that stay in shared memory, ``fixed_full`` their barrier; ``buffers``
are the tiles of the ring, then its barriers; ``index`` is the group of warps, 0 or 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qbench.attention.kernels import formulas
from qbench.attention.kernels.common import (
    CAPPED,
    DPARAM,
    DSINKS,
    DSLOPES,
    ELEMENTWISE,
    LOG_N1,
    NEEDS_EXPM1,
    SCALED,
    SCORE_MOD,
    SLOPED,
)
from qbench.attention.kernels.formulas import CHUNK, EPSILON, LN_2, SMALL_LSE
from qbench.attention.kernels.ptx import exp2_ftz

ROWS = gl.constexpr(64)  # that a group of warps holds, and that a stage loads
BLOCK = gl.constexpr(128)  # of both groups
CAPPED_OR_SLOPED = gl.constexpr(CAPPED.value | SLOPED.value)


@gluon.jit
def flat(tiles, stage):
    """Return a stage's tile as a matrix."""
    return tiles.index(stage).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def transposed(tiles, stage):
    """Return a stage's tile as a transposed matrix."""
    return flat(tiles, stage).permute([1, 0])


@gluon.jit
def causal_log2_length(rows, FLAGS: gl.constexpr):
    """Return log2 of the number of keys that each of ``rows`` sees, with LOG_N1 plus one."""
    if LOG_N1 & FLAGS:
        rows += 1
    return gl.log2((rows + 1).to(gl.float32))


@gluon.jit
def store_rows(out, x, first, batch, head, strides):
    """Store ``x`` [ROWS, HEAD_DIM] to ``out`` from row ``first`` on. ``strides``: of batch row,
    head and row."""
    rows = first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    pointers = out + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    pointers = pointers + rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    gl.store(pointers, x.to(gl.bfloat16))


@gluon.jit
def allocate(source, fixed_source, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Allocate shared memory. Return four ``fixed`` tiles, two rings of STAGES tiles each, and
    barriers: the fixed tiles are loaded, a stage is full, a stage is empty."""
    shape: gl.constexpr = [STAGES, 1, 1, ROWS, HEAD_DIM]
    fixed = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, ROWS, HEAD_DIM], fixed_source.layout)
    left = gl.allocate_shared_memory(gl.bfloat16, shape, source.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, shape, source.layout)
    fixed_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(fixed_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return fixed, left, right, fixed_full, full, empty


@gluon.jit
def load_fixed(left, right, fixed, fixed_full, batch, head, first):
    """Load the block's rows, from ``first`` on, of two sources; they stay in shared memory."""
    mbarrier.expect(fixed_full, 4 * left.block_type.nbytes)
    for i in gl.static_range(2):
        at = [batch, head, first + i * ROWS, 0]
        tma.async_copy_global_to_shared(left, at, fixed_full, fixed.index(2 * i))
        tma.async_copy_global_to_shared(right, at, fixed_full, fixed.index(2 * i + 1))


# The queries' gradients.


@gluon.jit
def any_small(lse_source, WARPS: gl.constexpr):
    """Return whether a row of the block, whose lse begins at ``lse_source``, needs another sweep
    for its D. WARPS: those that ask together."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.min(gl.load(lse_source + gl.arange(0, BLOCK, layout=layout)), 0) < SMALL_LSE


@gluon.jit
def load_tiles(k_source, v_source, buffers, batch, kv_head, before, count):
    """Load ``count`` tiles of keys and values into ``buffers``, after ``before`` earlier ones."""
    k_tiles, v_tiles, full, empty = buffers
    stages: gl.constexpr = k_tiles.shape[0]
    for i in range(count):
        stage = (before + i) % stages
        mbarrier.wait(empty.index(stage), ((before + i) // stages & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, k_source.block_type.nbytes + v_source.block_type.nbytes)
        at = [batch, kv_head, i * ROWS, 0]
        tma.async_copy_global_to_shared(k_source, at, bar, k_tiles.index(stage))
        tma.async_copy_global_to_shared(v_source, at, bar, v_tiles.index(stage))


@gluon.jit
def dq_loader(sources, fixed, buffers, fixed_full, lse_source, sizes, FLAGS: gl.constexpr):
    """Load the tiles of queries and of the output's gradients once, then all tiles of keys and
    values that these queries see; twice if a row's D needs a sweep of its own (``any_small``)."""
    q_source, k_source, v_source, g_source = sources
    heads, group, length = sizes
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK
    batch = pair // heads
    head = pair % heads
    load_fixed(q_source, g_source, fixed, fixed_full, batch, head, first)
    count = first // ROWS + 2
    load_tiles(k_source, v_source, buffers, batch, head // group, 0, count)
    if NEEDS_EXPM1 & FLAGS:
        lse_row = lse_source + pair.to(gl.int64) * length
        if any_small(lse_row + first, 1):  # that was the sweep for D
            load_tiles(k_source, v_source, buffers, batch, head // group, count, count)


@gluon.jit
def tile_products(q, g, buffers, tile, layout: gl.constexpr):
    """Start a tile's scores and dP, [ROWS, ROWS] each, queries × keys."""
    k_tiles, v_tiles, full, _ = buffers
    stages: gl.constexpr = k_tiles.shape[0]
    stage = tile % stages
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    mbarrier.wait(full.index(stage), tile // stages & 1)
    s = warpgroup_mma(q, transposed(k_tiles, stage), zero, use_acc=False, is_async=True)
    p = warpgroup_mma(g, transposed(v_tiles, stage), zero, use_acc=False, is_async=True)
    return s, p


@gluon.jit
def precise_delta(
    q, g, first, count, buffers, factor, score_mod, FLAGS: gl.constexpr, layout: gl.constexpr
):
    """Return D of each row [ROWS] over ``count`` tiles, for
    :func:`qbench.attention.kernels.backward.precise_delta`'s rows. ``factor``: s · log n [ROWS];
    ``score_mod``: as in :func:`dq_step`."""
    k_tiles, _, _, empty = buffers
    stages: gl.constexpr = k_tiles.shape[0]
    scale, inv_softcap, slope = score_mod
    score_mod = (
        formulas.times_s_log_n(scale, factor, FLAGS), inv_softcap,
        formulas.times_s_log_n(slope, factor, FLAGS), None,
    )  # fmt: skip
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))  # [ROWS]
    delta = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    highest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for tile in range(count):
        s, p = tile_products(q, g, buffers, tile, layout)
        s, p = warpgroup_mma_wait(0, [s, p])
        mbarrier.arrive(empty.index(tile % stages), count=1)
        keys = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        y, unused = formulas.scores_of(  # noqa: RUF059 (an underscore would be carried on)
            s, keys[None, :] - first, rows[:, None] - first, score_mod, FLAGS, True
        )  # fmt: skip
        y = gl.where(keys[None, :] <= rows[:, None], y, 0.0)
        above = gl.where(gl.abs(y) < 0.25, formulas.expm1_near_zero(y), exp2_ftz(y) - 1)
        delta += gl.sum(gl.maximum(above, 0.0) * p, 1)
        total += gl.sum(gl.abs(above), 1)
        highest = gl.maximum(highest, gl.max(above, 1))
    return delta / (total + EPSILON * (1 + highest))


@gluon.jit
def dq_step(
    dq, ds, s, p, dparam, dslopes, q, g, of_rows, tile, started, buffers, behind, score_mod,
    NORM: gl.constexpr, FLAGS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the previous tile to dq [ROWS, HEAD_DIM], and compute this tile's gradients of products
    ds [ROWS, ROWS]; ``dparam`` and ``dslopes`` [ROWS]: plus what a bias's gradient is the sum of,
    and those of scores times how far the key is ahead, for the slopes'. ``started``: there was a
    previous tile. PIPELINED, if there are registers for it: ``s`` and ``p`` are this tile's scores
    and dP [ROWS, ROWS], and those of the next tile are returned in their place, unless this is the
    last. ``of_rows``: lse, D, s · log n [ROWS] each; ``behind``: by how much the tile's first key
    is behind the group's first query; ``score_mod``: what products are multiplied by, and before a
    soft cap's tanh, and the slope. Nothing is in flight when it ends."""
    k_tiles, _, _, empty = buffers
    stages: gl.constexpr = k_tiles.shape[0]
    PIPELINED: gl.constexpr = k_tiles.shape[4] == 64
    layout: gl.constexpr = s.type.layout
    before = gl.where(started, tile - 1, tile) % stages
    ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, dq.type.layout, 2))
    next_s = s
    next_p = p
    if not PIPELINED:
        s, p = tile_products(q, g, buffers, tile, layout)
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    if PIPELINED and not MASKED:
        next_s, next_p = tile_products(q, g, buffers, tile + 1, layout)
        s, p = warpgroup_mma_wait(3, [s, p])  # they are there: keeps the order
    elif not PIPELINED:
        s, p = warpgroup_mma_wait(1, [s, p])
    lse, delta, factor = of_rows
    scale, inv_softcap, slope = score_mod
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    z, s, tanhs = formulas.scores_minus_lse(
        s, keys[None, :], (rows + behind)[:, None], factor[:, None], scale, inv_softcap, slope,
        lse[:, None], NORM, FLAGS, False,
    )  # fmt: skip
    e = formulas.recompute_e(z, s, NORM, True, True)
    ds = formulas.score_gradient(e, s, p, delta[:, None], NORM, True)
    if MASKED:
        ds = gl.where(keys[None, :] <= rows[:, None], ds, 0.0)
    if ELEMENTWISE & FLAGS:  # noqa: SIM102 (constexprs)
        if DPARAM & FLAGS:
            dparam += gl.sum(ds, 1)
    if DSLOPES & FLAGS:
        ahead = (keys - behind)[None, :] - rows[:, None]
        dslopes += gl.sum(ds * ahead.to(gl.float32), 1)
    if CAPPED & FLAGS:
        ds = ds * formulas.cap_gradient(tanhs)
    if PIPELINED and not MASKED:
        next_s, next_p, dq = warpgroup_mma_wait(0, [next_s, next_p, dq])
    else:
        dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(empty.index(before), count=1, pred=started)
    return dq, ds, next_s, next_p, dparam, dslopes


@gluon.jit
def dq_rows(
    fixed, buffers, fixed_full, rows_of, of_head, sizes, scales, strides, index,
    NORM: gl.constexpr, FLAGS: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Compute and store dq, and the parameters' gradients, of the 64 rows of one warp group; other
    arguments as in :func:`hopper_bwd_dq`."""
    k_tiles = buffers[0]
    heads, _, length = sizes
    scale, log2_scale, inv_softcap = scales
    slope, s_of_head, sink = of_head
    score_mod = (log2_scale, inv_softcap, slope)
    o_strides, dq_strides = strides
    o_source, lse_source, stats, dq_out, dparam_rows, dsinks_rows, dslopes_rows = rows_of
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
    length_2 = causal_log2_length(first + rows, FLAGS)  # [ROWS]
    factor = s_of_head * length_2
    mbarrier.wait(fixed_full, 0)
    g = flat(fixed, index * 2 + 1)
    delta = gl.sum(o.to(gl.float32) * g.load(wide).to(gl.float32), 1)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, layout))
    q = flat(fixed, index * 2)
    if FLAGS & CAPPED_OR_SLOPED == 0 or HEAD_DIM == 128:  # else the registers are needed
        q = q.load(left)
    last = first // ROWS
    skipped = 0
    if NEEDS_EXPM1 & FLAGS:  # noqa: SIM102 (one is known at compile time)
        if any_small(lse_source + row_offset - index * ROWS, 4):
            skipped = last - index + 2
            exact = precise_delta(
                q, g, first, skipped, buffers, factor[:, None], score_mod, FLAGS, layout
            )
            delta = gl.where(lse < SMALL_LSE, exact, delta)
    stat = stats + row_offset * 4 + rows // BLOCK_Q * (4 * BLOCK_Q) + rows % BLOCK_Q
    gl.store(stat, formulas.sloped_lse(lse, rows % BLOCK_Q, slope, NORM, FLAGS))
    gl.store(stat + BLOCK_Q, exp2_ftz(-lse))
    if SCALED & FLAGS:
        gl.store(stat + 2 * BLOCK_Q, delta * (factor * log2_scale))
        gl.store(stat + 3 * BLOCK_Q, factor * log2_scale)
    else:
        gl.store(stat + 2 * BLOCK_Q, delta)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    dparam = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    dslopes = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    of_rows = (lse, delta, factor)
    ds = gl.zeros([ROWS, ROWS], gl.float32, layout)
    s = ds
    p = ds
    begin = 0
    UNROLL: gl.constexpr = 2 if HEAD_DIM == 64 else 1  # tiles
    if UNROLL == 2:
        s, p = tile_products(q, g, buffers, skipped, layout)
        s, p = warpgroup_mma_wait(0, [s, p])
        begin = index
        if index == 1:  # an odd number of whole tiles
            dq, ds, s, p, dparam, dslopes = dq_step(
                dq, ds, s, p, dparam, dslopes, q, g, of_rows, skipped, False, buffers, first,
                score_mod, NORM, FLAGS, False,
            )  # fmt: skip
    for start in range(begin, last, UNROLL):
        for i in gl.static_range(UNROLL):
            tile = start + i
            dq, ds, s, p, dparam, dslopes = dq_step(
                dq, ds, s, p, dparam, dslopes, q, g, of_rows, skipped + tile, tile > 0, buffers,
                first - tile * ROWS, score_mod, NORM, FLAGS, False,
            )  # fmt: skip
    dq, ds, s, p, dparam, dslopes = dq_step(
        dq, ds, s, p, dparam, dslopes, q, g, of_rows, skipped + last, last > 0, buffers, 0,
        score_mod, NORM, FLAGS, True,
    )  # fmt: skip
    ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, sum_layout, 2))
    dq = warpgroup_mma(ds, flat(k_tiles, (skipped + last) % stages), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    if SCALED & FLAGS:
        last_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sum_layout))
        last_length = causal_log2_length(first + last_rows, FLAGS)
    if DPARAM & FLAGS:
        if ELEMENTWISE & FLAGS:
            gl.store(dparam_rows + row_offset + rows, dparam)
        if SCALED & FLAGS:  # Σ dS · score is q · dq
            product = gl.sum(flat(fixed, index * 2).load(sum_layout).to(gl.float32) * dq, 1)
            product = product * (last_length * (scale * LN_2))
            gl.store(dparam_rows + row_offset + last_rows, product)
    if DSINKS & FLAGS:
        gl.store(dsinks_rows + row_offset + rows, formulas.sink_gradient(sink, lse, delta))
    if DSLOPES & FLAGS:
        if SCALED & FLAGS:
            dslopes = dslopes * (s_of_head * length_2)
        gl.store(dslopes_rows + row_offset + rows, dslopes)
    if SCALED & FLAGS:
        dq = dq * (s_of_head * last_length)[:, None]
    store_rows(dq_out, dq * scale, first, batch, head, dq_strides)


@gluon.jit
def hopper_bwd_dq(
    q_source, k_source, v_source, g_source, o_source, lse_source, stats, dq_out, dparam_rows,
    dsinks_rows, dslopes_rows, sinks, slopes, s, sizes, scales, strides,
    NORM: gl.constexpr, FLAGS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Compute dq, and in blocks of BLOCK_Q rows the ``stats`` that the dk/dv kernel reads: lse,
    2^−lse, D and, with SCALED, s · log n in units of the scores, by which D is multiplied.
    ``sizes``: query heads, query heads per key head, length; ``scales``: of dq, of scores in log2
    units, and before a soft cap's tanh; ``dparam_rows``, ``dsinks_rows``, ``dslopes_rows``,
    ``sinks``, ``slopes``, ``s``: as in backward.py; ``strides``: of output and dq."""
    fixed, k_tiles, v_tiles, fixed_full, full, empty = allocate(
        k_source, q_source, STAGES, HEAD_DIM
    )
    buffers = (k_tiles, v_tiles, full, empty)
    sources = (q_source, k_source, v_source, g_source)
    rows_of = (o_source, lse_source, stats, dq_out, dparam_rows, dsinks_rows, dslopes_rows)
    head = gl.program_id(1) % sizes[0]
    slope = formulas.load_slope(head, slopes, FLAGS)
    of_head = (slope, formulas.load_s(head, s, FLAGS), formulas.load_sink(head, sinks, FLAGS))
    gl.warp_specialize(
        [
            (dq_rows, (fixed, buffers, fixed_full, rows_of, of_head, sizes, scales, strides, 0,
             NORM, FLAGS, BLOCK_Q)),
            (dq_rows, (fixed, buffers, fixed_full, rows_of, of_head, sizes, scales, strides, 1,
             NORM, FLAGS, BLOCK_Q)),
            (dq_loader, (sources, fixed, buffers, fixed_full, lse_source, sizes, FLAGS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# The gradients of keys and values.


@gluon.jit
def dkdv_loader(sources, fixed, buffers, fixed_full, sizes):
    """Load the keys' and values' tiles once, then of every query head the tiles of queries, of the
    output's gradients and of the rows' numbers (``stats``), the last queries first."""
    q_source, k_source, v_source, g_source, stat_source = sources
    q_tiles, g_tiles, stat_tiles, full, empty = buffers
    kv_heads, group, length = sizes
    stages: gl.constexpr = q_tiles.shape[0]
    nbytes: gl.constexpr = q_source.block_type.nbytes + g_source.block_type.nbytes + 16 * ROWS
    tile = 0
    pair = gl.program_id(1)
    first = gl.program_id(0) * BLOCK
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    load_fixed(k_source, v_source, fixed, fixed_full, batch, kv_head, first)
    for member in range(group):
        row_offset = (pair * group + member) * length
        for row in range(length - ROWS, first - 1, -ROWS):
            stage = tile % stages
            mbarrier.wait(empty.index(stage), (tile // stages & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, nbytes)
            at = [batch, kv_head * group + member, row, 0]
            tma.async_copy_global_to_shared(q_source, at, bar, q_tiles.index(stage))
            tma.async_copy_global_to_shared(g_source, at, bar, g_tiles.index(stage))
            tma.async_copy_global_to_shared(
                stat_source, [(row_offset + row) * 4], bar, stat_tiles.index(stage)
            )
            tile += 1


@gluon.jit
def seen_by(step, layout: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Return which of a group's keys each query of a tile sees. ``step``: of the tiles on the
    diagonal, counted from the last query."""
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, layout))
    return keys[:, None] <= (ROWS - (step + 1) * BLOCK_Q + columns)[None, :]


@gluon.jit
def tile_of(tiles, stage, half, BLOCK_Q: gl.constexpr):
    """Return a stage's tile [BLOCK_Q, HEAD_DIM]; of two per stage, the earlier queries' (0) or the
    later's (1)."""
    tile = flat(tiles, stage)
    if BLOCK_Q < ROWS:
        tile = tile.slice(half * BLOCK_Q, BLOCK_Q, dim=0)
    return tile


@gluon.jit
def tile_scores(k, buffers, loaded, half, BLOCK_Q: gl.constexpr):
    """Start a tile's scores [ROWS, BLOCK_Q], keys × queries. Of two tiles per stage the later
    queries' comes first, and is waited for; ``k`` is in two parts then."""
    q_tiles, full = buffers[0], buffers[3]
    stages: gl.constexpr = q_tiles.shape[0]
    PAIRS: gl.constexpr = BLOCK_Q < ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    stage = loaded % stages
    if half == 1 or not PAIRS:
        mbarrier.wait(full.index(stage), loaded // stages & 1)
    q = tile_of(q_tiles, stage, half, BLOCK_Q).permute([1, 0])
    if PAIRS:
        width: gl.constexpr = q.shape[0] // 2
        s = warpgroup_mma(k[0], q.slice(0, width, dim=0), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(k[1], q.slice(width, width, dim=0), s, is_async=True)
    else:
        s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    return s


@gluon.jit
def dkdv_step(
    dk, dv, ds, s, k, v, loaded, started, buffers, behind, score_mod,
    NORM: gl.constexpr, FLAGS: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr,
    HALF: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Add the previous tile to dk [ROWS, HEAD_DIM] and this one to dv, compute this one's ds [ROWS,
    BLOCK_Q], and start the scores of the next, unless this is the last. ``loaded``: its index among
    the tiles that were loaded; HALF: which of two tiles of a stage, else 0; ``behind``: by how much
    the group's first key is behind the tile's first query; ``score_mod``: as in :func:`dq_step`.
    Nothing is in flight when it ends."""
    q_tiles, g_tiles, stat_tiles, _, empty = buffers
    stages: gl.constexpr = q_tiles.shape[0]
    PAIRS: gl.constexpr = BLOCK_Q < ROWS
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    last: gl.constexpr = MASKED and HALF == 0
    first: gl.constexpr = HALF == 1 or not PAIRS  # of its stage
    OTHER: gl.constexpr = 1 - HALF if PAIRS else 0
    layout: gl.constexpr = s.type.layout
    stage = loaded % stages
    before = stage
    if first:
        before = gl.where(started, loaded - 1, loaded) % stages
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    g = tile_of(g_tiles, stage, HALF, BLOCK_Q)
    q_before = tile_of(q_tiles, before, OTHER, BLOCK_Q)
    if PAIRS:
        dk = warpgroup_mma(ds, q_before, dk, is_async=True)
        p = warpgroup_mma(v, g.permute([1, 0]), zero, use_acc=False, is_async=True)
    else:
        p = warpgroup_mma(v, g.permute([1, 0]), zero, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds, q_before, dk, is_async=True)
    if not last:
        more = tile_scores(k, buffers, loaded + (1 - HALF), OTHER, BLOCK_Q)
    stat = stat_tiles.index(stage)
    if PAIRS:
        stat = stat.slice(HALF * 4 * BLOCK_Q, 4 * BLOCK_Q)
    scale, inv_softcap, slope = score_mod
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_Q, layout=column_layout)
    lse = stat.slice(0, BLOCK_Q).load(column_layout)  # [BLOCK_Q]
    factor = 1.0
    if SCALED & FLAGS:
        factor = stat.slice(3 * BLOCK_Q, BLOCK_Q).load(column_layout)[None, :]
    z, s, tanhs = formulas.scores_minus_lse(
        s, (keys - behind)[:, None], columns[None, :], factor, scale, inv_softcap, slope,
        lse[None, :], NORM, FLAGS, True,
    )  # fmt: skip
    e = formulas.recompute_e(z, s, NORM, True, True)
    floor = stat.slice(BLOCK_Q, BLOCK_Q).load(column_layout)[None, :]
    y = s
    if SCORE_MOD & FLAGS == 0:
        y = s * scale
    above = formulas.recompute_p(e, y, floor, NORM, PRECISE)
    if MASKED:
        above = gl.where(seen_by(OTHER, layout, BLOCK_Q), above, 0.0)
    p_cast = gl.convert_layout(formulas.cast_p(above, gl.bfloat16, NORM, True), left)
    if last:
        p, dk = warpgroup_mma_wait(0, [p, dk])
    else:
        p, dk = warpgroup_mma_wait(1, [p, dk])
    if first:
        mbarrier.arrive(empty.index(before), count=1, pred=started)
    dv = warpgroup_mma(p_cast, g, dv, is_async=True)
    delta = stat.slice(2 * BLOCK_Q, BLOCK_Q).load(column_layout)
    if SCALED & FLAGS:  # as D has been: a product and a difference are one instruction
        p = p * factor
    ds = formulas.score_gradient(e, s, p, delta[None, :], NORM, True)
    if CAPPED & FLAGS:
        ds = ds * formulas.cap_gradient(tanhs)
    if MASKED:
        ds = gl.where(seen_by(OTHER, layout, BLOCK_Q), ds, 0.0)
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    if last:
        dv = warpgroup_mma_wait(0, [dv])
    else:
        s, dv = warpgroup_mma_wait(0, [more, dv])
    return dk, dv, ds, s


@gluon.jit
def dkdv_head(
    dk, dv, k, v, loaded, unmasked, first, length, buffers, score_mod, index,
    NORM: gl.constexpr, FLAGS: gl.constexpr, PRECISE: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Add to dk and dv [ROWS, HEAD_DIM] the tiles of queries of one head: of ``unmasked`` stages,
    then of the stage on the causal diagonal. ``first``: the warp group's first key. ``loaded``: the
    number of stages loaded before. Two tiles per iteration, of one stage or of two."""
    q_tiles, empty = buffers[0], buffers[4]
    stages: gl.constexpr = q_tiles.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    TILES: gl.constexpr = ROWS // BLOCK_Q  # of a stage
    ds = gl.zeros([ROWS, BLOCK_Q], gl.bfloat16, left)
    s = tile_scores(k, buffers, loaded, TILES - 1, BLOCK_Q)
    s = warpgroup_mma_wait(0, [s])
    begin = 0
    if TILES == 1:
        begin = 1 - index
        if index == 0:  # an odd number of whole tiles
            dk, dv, ds, s = dkdv_step(
                dk, dv, ds, s, k, v, loaded, False, buffers, length - BLOCK_Q - first, score_mod,
                NORM, FLAGS, PRECISE, False, 0, BLOCK_Q,
            )  # fmt: skip
    for turn in range(begin, unmasked, 2 // TILES):
        for i in gl.static_range(2):
            n = turn + i // TILES
            tile = turn * TILES + i
            dk, dv, ds, s = dkdv_step(
                dk, dv, ds, s, k, v, loaded + n, n > 0, buffers,
                length - (tile + 1) * BLOCK_Q - first, score_mod,
                NORM, FLAGS, PRECISE, False, (TILES - 1) * (1 - i), BLOCK_Q,
            )  # fmt: skip
    for i in gl.static_range(TILES):
        dk, dv, ds, s = dkdv_step(
            dk, dv, ds, s, k, v, loaded + unmasked, unmasked > 0, buffers,
            (TILES - 1 - i) * BLOCK_Q, score_mod, NORM, FLAGS, PRECISE, True, TILES - 1 - i,
            BLOCK_Q,
        )  # fmt: skip
    stage = (loaded + unmasked) % stages
    dk = warpgroup_mma(ds, tile_of(q_tiles, stage, 0, BLOCK_Q), dk, is_async=True)
    dk = warpgroup_mma_wait(0, [dk])
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def dkdv_rows(
    fixed, buffers, fixed_full, slopes, dk_out, dv_out, index, sizes, scales, strides,
    NORM: gl.constexpr, FLAGS: gl.constexpr, PRECISE: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Compute and store dk and dv of one warp group's 64 keys, over the heads that share them;
    other arguments as in :func:`hopper_bwd_dkdv`."""
    q_tiles, full, empty = buffers[0], buffers[3], buffers[4]
    kv_heads, group, length = sizes
    scale, log2_scale, inv_softcap = scales
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    stages: gl.constexpr = q_tiles.shape[0]
    PAIRS: gl.constexpr = BLOCK_Q < ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    tile = 0
    pair = gl.program_id(1)
    first = gl.program_id(0) * BLOCK + index * ROWS
    mbarrier.wait(fixed_full, 0)
    k = flat(fixed, index * 2)
    v = flat(fixed, index * 2 + 1)
    if PAIRS:
        half: gl.constexpr = HEAD_DIM // 2
        k = (k.slice(0, half, dim=1).load(left), k.slice(half, half, dim=1))
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    unmasked = (length - first - ROWS) // ROWS
    for member in range(group):
        head = pair % kv_heads * group + member
        slope = formulas.load_slope(head, slopes, FLAGS)
        if SCALED & FLAGS:  # s · log n is in units of the scores
            score_mod = (1.0, inv_softcap, slope / log2_scale)
        else:
            score_mod = (log2_scale, inv_softcap, slope)
        dk, dv = dkdv_head(
            dk, dv, k, v, tile, unmasked, first, length, buffers, score_mod, index,
            NORM, FLAGS, PRECISE, BLOCK_Q,
        )  # fmt: skip
        tile += unmasked + 1
        if index == 1:  # the other group's last tile
            mbarrier.wait(full.index(tile % stages), tile // stages & 1)
            mbarrier.arrive(empty.index(tile % stages), count=1)
            tile += 1
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    if SCALED & FLAGS:
        scale = scale / log2_scale
    store_rows(dk_out, dk * scale, first, batch, kv_head, strides[0])
    store_rows(dv_out, dv, first, batch, kv_head, strides[1])


@gluon.jit
def hopper_bwd_dkdv(
    q_source, k_source, v_source, g_source, stat_source, needs_expm1, slopes, dk_out, dv_out, sizes,
    scales, strides,
    NORM: gl.constexpr, FLAGS: gl.constexpr, PRECISE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Compute gradients of keys and values, by BLOCK_Q queries per tile. ``sizes``: key heads, how
    many query heads share one, length; ``scales``: see the queries' kernel; ``strides``: of dk and
    dv. It is launched once PRECISE and once not; the launch that no flag needs returns at once."""
    if NEEDS_EXPM1 & FLAGS:
        flags = needs_expm1 + gl.program_id(1) * (sizes[2] // CHUNK) + gl.program_id(0) * 2
        gl.static_assert(BLOCK == 2 * CHUNK)
        if ((gl.load(flags) | gl.load(flags + 1)) != 0) != PRECISE:
            return
    fixed, q_tiles, g_tiles, fixed_full, full, empty = allocate(
        q_source, k_source, STAGES, HEAD_DIM
    )
    stat_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * ROWS], stat_source.layout)
    buffers = (q_tiles, g_tiles, stat_tiles, full, empty)
    sources = (q_source, k_source, v_source, g_source, stat_source)
    gl.warp_specialize(
        [
            (dkdv_rows, (fixed, buffers, fixed_full, slopes, dk_out, dv_out, 0, sizes, scales,
             strides, NORM, FLAGS, PRECISE, BLOCK_Q)),
            (dkdv_rows, (fixed, buffers, fixed_full, slopes, dk_out, dv_out, 1, sizes, scales,
             strides, NORM, FLAGS, PRECISE, BLOCK_Q)),
            (dkdv_loader, (sources, fixed, buffers, fixed_full, sizes)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
