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

from qbench.attention.kernels.family import CHUNK
from qbench.attention.kernels.gluon_family import (
    BLOCK,
    ROWS,
    flat,
    sign_level,
    store_rows,
    turned,
)
from qbench.attention.kernels.gluon_keys_ahead import ahead_keys
from qbench.attention.kernels.gluon_keys_pairs import pairs_of_keys
from qbench.attention.kernels.gluon_weights import tile_weights, weighed_gradients
from qbench.attention.kernels.modes import SCALED
from qbench.attention.kernels.scores import head_factor, slope_of


@gluon.jit
def key_loader(sources, own, ring, here, sizes):
    q_source, k_source, v_source, g_source, stat_source = sources
    q_tiles, g_tiles, stat_tiles, ready, free = ring
    kv_heads, group, length = sizes
    stages: gl.constexpr = q_tiles.shape[0]
    loaded: gl.constexpr = q_source.block_type.shape[2]
    nbytes: gl.constexpr = q_source.block_type.nbytes + g_source.block_type.nbytes + 16 * loaded
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
        for row in range(length - loaded, first - 1, -loaded):
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
    this tile's gradients ds [ROWS, BLOCK_Q]. Other arguments: see :func:`tile_weights`.
    The assembler moves arithmetic behind waits; it cannot move the weights behind their product."""
    q_tiles, g_tiles, stat_tiles, ready, free = ring
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = ds.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = tile % stages
    before = gl.where(started, tile - 1, tile) % stages
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    mbarrier.wait(ready.index(slot), tile // stages & 1)
    s = warpgroup_mma(k, turned(q_tiles, slot), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds, flat(q_tiles, before), dk, is_async=True)
    p = warpgroup_mma(v, turned(g_tiles, slot), zero, use_acc=False, is_async=True)
    stat = stat_tiles.index(slot)
    s = warpgroup_mma_wait(2, [s])  # [ROWS, BLOCK_Q]: keys × queries
    weight, of_scores = tile_weights(
        s, stat, step, behind, shaping, left, FAMILY, MODES, PRECISE, MASKED, BLOCK_Q
    )
    dv = warpgroup_mma(weight, flat(g_tiles, slot), dv, is_async=True)
    p, dk = warpgroup_mma_wait(1, [p, dk])  # p: [ROWS, BLOCK_Q]
    mbarrier.arrive(free.index(before), count=1, pred=started)
    ds = weighed_gradients(
        of_scores, p, stat, step, shaping, FAMILY, MODES, PRECISE, MASKED, BLOCK_Q
    )
    dv, ds = warpgroup_mma_wait(0, [dv, ds])
    return dk, dv, ds


@gluon.jit
def key_rows(
    own, ring, here, of_heads, dk_out, dv_out, index, sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, HELD: gl.constexpr,
    BLOCK_Q: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    q_tiles, ready, free = ring[0], ring[3], ring[4]
    slopes, s = of_heads
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
    if HELD == 0.5:
        half: gl.constexpr = HEAD_DIM // 2
        k = (k.slice(0, half, dim=1).load(left), k.slice(half, half, dim=1))
    elif HELD > 0:
        k = k.load(left)
    if HELD > 1:
        v = v.load(left)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    loaded: gl.constexpr = q_tiles.shape[3]
    whole = (length - first - ROWS) // loaded
    for member in range(group):
        head = pair % kv_heads * group + member
        slope = slope_of(head, slopes, MODES)
        sign = sign_level(head_factor(head, s, MODES), MODES)
        if SCALED & MODES:  # s · log n is in units of the scores
            shaping = (1.0, inner, slope / score_scale, sign)
        else:
            shaping = (score_scale, inner, slope, sign)
        if AHEAD == "pairs":
            dk, dv = pairs_of_keys(
                dk, dv, k, v, tile, whole, first, length, ring, shaping,
                FAMILY, MODES, PRECISE, HELD, BLOCK_Q,
            )  # fmt: skip
            tile += whole + 1
        elif AHEAD:
            dk, dv = ahead_keys(
                dk, dv, k, v, tile, whole, first, length, ring, shaping, index,
                FAMILY, MODES, PRECISE, BLOCK_Q,
            )  # fmt: skip
            tile += whole + 1
        else:
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
            for _ in gl.static_range(ROWS // loaded):
                mbarrier.wait(ready.index(tile % stages), tile // stages & 1)
                mbarrier.arrive(free.index(tile % stages), count=1)
                tile += 1
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    if SCALED & MODES:
        scale = scale / score_scale
    store_rows(dk_out, dk * scale, first, batch, kv_head, strides[0])
    store_rows(dv_out, dv, first, batch, kv_head, strides[1])


@gluon.jit
def key_kernel(
    q_source, k_source, v_source, g_source, stat_source, imprecise, slopes, s, dk_out, dv_out,
    sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, NEAR_ZERO: gl.constexpr, PRECISE: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, BLOCK_Q: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, by BLOCK_Q queries a tile. ``sizes``: key heads, how many query
    heads share one, length; ``scales`` and the ring: see the queries' kernel; ``strides``: of dk
    and dv. One launch is PRECISE and another is not; that which the forward pass's flags do not ask
    for returns at once. HELD: how many of k and v are kept in registers."""
    if NEAR_ZERO:
        flags = imprecise + gl.program_id(1) * (sizes[2] // CHUNK) + gl.program_id(0) * 2
        gl.static_assert(BLOCK == 2 * CHUNK)
        if ((gl.load(flags) | gl.load(flags + 1)) != 0) != PRECISE:
            return
    loaded: gl.constexpr = q_source.block_type.shape[2]  # queries of a slot
    own = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, ROWS, HEAD_DIM], k_source.layout)
    q_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, loaded, HEAD_DIM], q_source.layout
    )
    g_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, loaded, HEAD_DIM], g_source.layout
    )
    stat_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * loaded], stat_source.layout)
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
            (key_rows, (own, ring, here, (slopes, s), dk_out, dv_out, 0, sizes, scales, strides,
             FAMILY, MODES, PRECISE, HELD, BLOCK_Q, AHEAD)),
            (key_rows, (own, ring, here, (slopes, s), dk_out, dv_out, 1, sizes, scales, strides,
             FAMILY, MODES, PRECISE, HELD, BLOCK_Q, AHEAD)),
            (key_loader, (sources, own, ring, here, sizes)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
