"""Backward pass of the plain causal bf16 case, where Hopper's tensor cores are to be kept busy.

The same two kernels as in :mod:`qbench.attention.kernels.backward`, in Gluon, which says which
warps do what. One warp loads tiles ahead; two groups of four warps hold 64 rows each, and while
one computes exponentials the tensor cores work for the other. What a tile's scores' gradients give
is computed with the next tile's scores. Operands that stay are kept in registers where there is
room: read from shared memory each time, they would take as much of its bandwidth as there is.
"""

from __future__ import annotations

# ruff: noqa: RET505 (Triton compiles an early return in a constexpr branch only with its else)
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qbench.attention.kernels.family import LOG2_E, expm1_near_zero, rounded

ROWS = gl.constexpr(64)  # that a group of warps holds
BLOCK = gl.constexpr(128)  # of both groups

# Batch × heads × length² × head dimension from which this is faster than the Triton kernels. With
# less, it is the launches that take the time, and these take more: 0.25 ms of the host's.
ENOUGH = 10**10

# By head dimension, for each kernel: queries a tile of the keys' kernel, and then for each kernel
# the slots of its pipeline and how many of its two operands that stay are in registers.
TILES = {64: (64, (4, 2), (4, 2)), 128: (32, (3, 1), (4, 1))}


@gluon.jit
def flat(tiles, slot):
    """A slot's tile, as a matrix."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def turned(tiles, slot):
    return flat(tiles, slot).permute([1, 0])


@gluon.jit
def exp2(y):
    """Without the care for denormal numbers, which costs three more instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def exponential(s, scale, level, NORMALIZER: gl.constexpr):
    """E, see :func:`qbench.attention.kernels.family.recomputed`."""
    e = exp2(s * scale - level)
    if NORMALIZER == "rectified":
        e = gl.where(s >= 0, e, 0.0)
    return e


@gluon.jit
def score_gradient(e, s, p, delta, NORMALIZER: gl.constexpr):
    """See :func:`qbench.attention.kernels.family.score_gradient`; in softpick
    E · D, or where the score is positive E · dP − E · D, which one predicate does."""
    if NORMALIZER == "softpick":
        return gl.inline_asm_elementwise(
            """{
            .reg .pred positive;
            .reg .f32 product, negated;
            setp.gt.f32 positive, $2, 0f00000000;
            mul.f32 product, $1, $4;
            neg.f32 negated, product;
            @positive fma.rn.f32 product, $1, $3, negated;
            mov.f32 $0, product;
            }""",
            "=f,f,f,f,f",
            [e, s, p, delta],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return e * (p - delta)


@gluon.jit
def store_rows(out, sums, first, batch, head, out_b, out_h, out_t):
    rows = first + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout))
    columns = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    place = out + batch.to(gl.int64) * out_b + head.to(gl.int64) * out_h
    gl.store(place + rows.to(gl.int64)[:, None] * out_t + columns[None, :], sums.to(gl.bfloat16))


@gluon.jit
def query_loader(
    q_source, k_source, v_source, g_source, own, k_tiles, v_tiles, here, ready, free,
    heads, group, length,
):  # fmt: skip
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK
    batch = pair // heads
    head = pair % heads
    mbarrier.expect(here, 4 * q_source.block_type.nbytes)
    for i in gl.static_range(2):
        at = [batch, head, first + i * ROWS, 0]
        tma.async_copy_global_to_shared(q_source, at, here, own.index(2 * i))
        tma.async_copy_global_to_shared(g_source, at, here, own.index(2 * i + 1))
    for i in range(first // ROWS + 2):
        slot = i % k_tiles.shape[0]
        mbarrier.wait(free.index(slot), (i // k_tiles.shape[0] & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, k_source.block_type.nbytes + v_source.block_type.nbytes)
        at = [batch, head // group, i * ROWS, 0]
        tma.async_copy_global_to_shared(k_source, at, bar, k_tiles.index(slot))
        tma.async_copy_global_to_shared(v_source, at, bar, v_tiles.index(slot))


@gluon.jit
def query_step(
    dq, ds, q, g, level, delta, tile, k_tiles, v_tiles, ready, free, scale,
    NORMALIZER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dq, and computes this tile's gradient of scores."""
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = ds.type.layout
    slot = tile % stages
    before = gl.maximum(tile - 1, 0) % stages
    ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, dq.type.layout, 2))
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    mbarrier.wait(ready.index(slot), tile // stages & 1)
    s = warpgroup_mma(q, turned(k_tiles, slot), zero, use_acc=False, is_async=True)
    p = warpgroup_mma(g, turned(v_tiles, slot), zero, use_acc=False, is_async=True)
    dq = warpgroup_mma(ds, flat(k_tiles, before), dq, is_async=True)
    s, p, dq = warpgroup_mma_wait(0, [s, p, dq])
    mbarrier.arrive(free.index(before), count=1, pred=tile > 0)
    e = exponential(s, scale, level[:, None], NORMALIZER)
    ds = score_gradient(e, s, p, delta[:, None], NORMALIZER)
    if MASKED:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        keys = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        ds = gl.where(keys[None, :] <= rows[:, None], ds, 0.0)
    return dq, ds


@gluon.jit
def query_rows(
    own, k_tiles, v_tiles, here, ready, free, o_source, levels, stats, dq_out, index,
    heads, length, scale, score_scale, o_b, o_h, o_t, dq_b, dq_h, dq_t,
    NORMALIZER: gl.constexpr, HELD: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = k_tiles.shape[4]
    stages: gl.constexpr = k_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    wide_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK + index * ROWS
    batch = pair // heads
    head = pair % heads
    place = o_source + batch.to(gl.int64) * o_b + head.to(gl.int64) * o_h
    place += (first + wide_rows).to(gl.int64)[:, None] * o_t + columns[None, :]
    o = gl.load(place)
    line = pair.to(gl.int64) * length + first
    level = gl.load(levels + line + rows)
    mbarrier.wait(here, 0)
    q = flat(own, index * 2)
    g = flat(own, index * 2 + 1)
    delta = gl.sum(o.to(gl.float32) * g.load(wide).to(gl.float32), 1)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, layout))
    if HELD > 0:
        q = q.load(left)
    if HELD > 1:
        g = g.load(left)
    stat = stats + line * 4 + rows // M * (4 * M) + rows % M
    gl.store(stat, level)
    gl.store(stat + M, exp2(-level))
    gl.store(stat + 2 * M, delta)
    dq = gl.zeros([ROWS, D], gl.float32, sum_layout)
    ds = gl.zeros([ROWS, ROWS], gl.float32, layout)
    last = first // ROWS
    for tile in range(last):
        dq, ds = query_step(
            dq, ds, q, g, level, delta, tile, k_tiles, v_tiles, ready, free, score_scale,
            NORMALIZER, False,
        )  # fmt: skip
    dq, ds = query_step(
        dq, ds, q, g, level, delta, last, k_tiles, v_tiles, ready, free, score_scale,
        NORMALIZER, True,
    )  # fmt: skip
    ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, sum_layout, 2))
    dq = warpgroup_mma(ds, flat(k_tiles, last % stages), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    store_rows(dq_out, dq * scale, first, batch, head, dq_b, dq_h, dq_t)


@gluon.jit
def query_kernel(
    q_source, k_source, v_source, g_source, o_source, levels, stats, dq_out,
    heads, group, length, scale, score_scale, o_b, o_h, o_t, dq_b, dq_h, dq_t,
    NORMALIZER: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    M: gl.constexpr,
):  # fmt: skip
    """Gradients of queries; and their levels, 2^−level and D, by M of each, for the other kernel.
    HELD: how many of q and dO are kept in registers."""
    own = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, ROWS, D], q_source.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, ROWS, D], k_source.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, ROWS, D], v_source.layout)
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (query_rows, (own, k_tiles, v_tiles, here, ready, free, o_source, levels, stats,
             dq_out, 0, heads, length, scale, score_scale, o_b, o_h, o_t, dq_b, dq_h, dq_t,
             NORMALIZER, HELD, M)),
            (query_rows, (own, k_tiles, v_tiles, here, ready, free, o_source, levels, stats,
             dq_out, 1, heads, length, scale, score_scale, o_b, o_h, o_t, dq_b, dq_h, dq_t,
             NORMALIZER, HELD, M)),
            (query_loader, (q_source, k_source, v_source, g_source, own, k_tiles, v_tiles, here,
             ready, free, heads, group, length)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def key_loader(
    q_source, k_source, v_source, g_source, stat_source, own, q_tiles, g_tiles, stat_tiles,
    here, ready, free, kv_heads, group, length, M: gl.constexpr,
):  # fmt: skip
    stages: gl.constexpr = q_tiles.shape[0]
    nbytes: gl.constexpr = q_source.block_type.nbytes + g_source.block_type.nbytes + 16 * M
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
        line = (pair * group + member) * length
        for row in range(length - M, first - 1, -M):
            slot = tile % stages
            mbarrier.wait(free.index(slot), (tile // stages & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, nbytes)
            at = [batch, kv_head * group + member, row, 0]
            tma.async_copy_global_to_shared(q_source, at, bar, q_tiles.index(slot))
            tma.async_copy_global_to_shared(g_source, at, bar, g_tiles.index(slot))
            tma.async_copy_global_to_shared(
                stat_source, [(line + row) * 4], bar, stat_tiles.index(slot)
            )
            tile += 1


@gluon.jit
def key_step(
    dk, dv, ds, k, v, step, tile, started, q_tiles, g_tiles, stat_tiles, ready, free, scale,
    NORMALIZER: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Adds the tile before to dk and this one to dv, and computes this tile's gradient of scores.
    The assembler moves arithmetic behind waits; it cannot move the weights behind their product.
    ``step``: of the tiles on the diagonal, counted from the last query."""
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = ds.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    slot = tile % stages
    before = gl.where(started, tile - 1, tile) % stages
    ds = gl.convert_layout(ds.to(gl.bfloat16), left)
    zero = gl.zeros([ROWS, M], gl.float32, layout)
    mbarrier.wait(ready.index(slot), tile // stages & 1)
    s = warpgroup_mma(k, turned(q_tiles, slot), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds, flat(q_tiles, before), dk, is_async=True)
    p = warpgroup_mma(v, turned(g_tiles, slot), zero, use_acc=False, is_async=True)
    stat = stat_tiles.index(slot)
    level = stat.slice(0, M).load(column_layout)
    s = warpgroup_mma_wait(2, [s])
    e = exponential(s, scale, level[None, :], NORMALIZER)
    above = e
    if NORMALIZER == "softpick":
        floor = stat.slice(M, M).load(column_layout)
        above = e - floor[None, :]
        if PRECISE:
            y = s * scale
            above = gl.where(gl.abs(y) < 0.25, floor[None, :] * expm1_near_zero(y), above)
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    rows = ROWS - (step + 1) * M + gl.arange(0, M, layout=column_layout)
    seen = keys[:, None] <= rows[None, :]
    if MASKED:
        above = gl.where(seen, above, 0.0)
    weight = gl.convert_layout(rounded(above, gl.bfloat16, NORMALIZER, True), left)
    dv = warpgroup_mma(weight, flat(g_tiles, slot), dv, is_async=True)
    delta = stat.slice(2 * M, M).load(column_layout)
    p, dk = warpgroup_mma_wait(1, [p, dk])
    mbarrier.arrive(free.index(before), count=1, pred=started)
    ds = score_gradient(e, s, p, delta[None, :], NORMALIZER)
    if MASKED:
        ds = gl.where(seen, ds, 0.0)
    dv, ds = warpgroup_mma_wait(0, [dv, ds])
    return dk, dv, ds


@gluon.jit
def key_rows(
    own, q_tiles, g_tiles, stat_tiles, here, ready, free, dk_out, dv_out, index,
    kv_heads, group, length, scale, score_scale, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    NORMALIZER: gl.constexpr, PRECISE: gl.constexpr, HELD: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_tiles.shape[4]
    stages: gl.constexpr = q_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
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
    dk = gl.zeros([ROWS, D], gl.float32, sum_layout)
    dv = gl.zeros([ROWS, D], gl.float32, sum_layout)
    whole = (length - first - ROWS) // M
    for _ in range(group):
        ds = gl.zeros([ROWS, M], gl.float32, layout)
        for i in range(whole):
            dk, dv, ds = key_step(
                dk, dv, ds, k, v, 0, tile, i > 0, q_tiles, g_tiles, stat_tiles,
                ready, free, score_scale, NORMALIZER, PRECISE, False, M,
            )  # fmt: skip
            tile += 1
        for step in gl.static_range(ROWS // M):
            dk, dv, ds = key_step(
                dk, dv, ds, k, v, step, tile, whole + step > 0, q_tiles, g_tiles,
                stat_tiles, ready, free, score_scale, NORMALIZER, PRECISE, True, M,
            )  # fmt: skip
            tile += 1
        slot = (tile - 1) % stages
        ds = gl.convert_layout(ds.to(gl.bfloat16), gl.DotOperandLayout(0, sum_layout, 2))
        dk = warpgroup_mma(ds, flat(q_tiles, slot), dk, is_async=True)
        dk = warpgroup_mma_wait(0, [dk])
        mbarrier.arrive(free.index(slot), count=1)
        if index == 1:  # the other group's last tiles
            for _ in gl.static_range(ROWS // M):
                mbarrier.wait(ready.index(tile % stages), tile // stages & 1)
                mbarrier.arrive(free.index(tile % stages), count=1)
                tile += 1
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    store_rows(dk_out, dk * scale, first, batch, kv_head, dk_b, dk_h, dk_t)
    store_rows(dv_out, dv, first, batch, kv_head, dv_b, dv_h, dv_t)


@gluon.jit
def key_kernel(
    q_source, k_source, v_source, g_source, stat_source, imprecise, dk_out, dv_out,
    kv_heads, group, length, scale, score_scale, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    NORMALIZER: gl.constexpr, PRECISE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, by M queries a tile. One launch is PRECISE and another is
    not; that which the forward pass's flag does not ask for returns at once.
    HELD: how many of k and v are kept in registers."""
    if NORMALIZER == "softpick":  # noqa: SIM102 (one is known at compile time)
        if (gl.load(imprecise) != 0) != PRECISE:
            return
    own = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, ROWS, D], k_source.layout)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, M, D], q_source.layout)
    g_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, M, D], g_source.layout)
    stat_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * M], stat_source.layout)
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (key_rows, (own, q_tiles, g_tiles, stat_tiles, here, ready, free, dk_out,
             dv_out, 0, kv_heads, group, length, scale, score_scale,
             dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, NORMALIZER, PRECISE, HELD, M)),
            (key_rows, (own, q_tiles, g_tiles, stat_tiles, here, ready, free, dk_out,
             dv_out, 1, kv_heads, group, length, scale, score_scale,
             dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, NORMALIZER, PRECISE, HELD, M)),
            (key_loader, (q_source, k_source, v_source, g_source, stat_source, own, q_tiles,
             g_tiles, stat_tiles, here, ready, free, kv_heads, group, length, M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, levels: Tensor,
    imprecise: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, normalizer: str, scale: float,
) -> None:  # fmt: skip
    """Fills dq, dk and dv; for what :func:`fits` says."""
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    m, query_tile, key_tile = TILES[width]
    stats = torch.empty(4 * levels.numel(), dtype=torch.float32, device=query.device)
    fixed = {"NORMALIZER": normalizer, "D": width, "M": m, "num_warps": 4}
    sizes = (heads // kv_heads, length, scale, scale * LOG2_E)
    sources = [_descriptor(tensor, 64) for tensor in (query, key, value, gradient)]
    query_kernel[(length // 128, batch * heads)](
        *sources, output, levels, stats, dq, heads, *sizes, *output.stride()[:3],
        *dq.stride()[:3], STAGES=query_tile[0], HELD=query_tile[1], **fixed,
    )  # fmt: skip
    if m != 64:
        sources[0], sources[3] = _descriptor(query, m), _descriptor(gradient, m)
    sources.append(
        TensorDescriptor(stats, [stats.numel()], [1], [4 * m], gl.NVMMASharedLayout(0, 32, 1))
    )
    for precise in (False, True) if normalizer == "softpick" else (False,):
        key_kernel[(length // 128, batch * kv_heads)](
            *sources, imprecise, dk, dv, kv_heads, *sizes, *dk.stride()[:3], *dv.stride()[:3],
            PRECISE=precise, STAGES=key_tile[0], HELD=key_tile[1], **fixed,
        )  # fmt: skip


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int) -> bool:
    """Whether the kernels here are for such tensors, where there is no mask and no spans."""
    batch, heads, length, width = query.shape
    return (
        causal
        and window == 0
        and query.dtype == torch.bfloat16
        and width in TILES
        and width == value.shape[3]
        and length == key.shape[2]
        and length % 128 == 0
        and batch * heads * length * length * width >= ENOUGH
        and batch * heads * length < 2**29  # counted in 32 bits, by 4
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Of tiles of ``rows`` rows of one head."""
    shape = [1, 1, rows, tensor.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, shape, layout)
