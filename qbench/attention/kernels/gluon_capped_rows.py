"""What a group of warps does with a block of queries, for the kernel in
:mod:`qbench.attention.kernels.gluon_capped`.

While it computes a tile's weights, the tensor cores work at its values' product of the tile before
and its scores of the tile after. Nothing is in flight from one turn of the loop to the next, and a
turn has two tiles: else the assembler waits for each product before the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qbench.attention.kernels.gluon_family import ROWS, flat, store_rows, turned
from qbench.attention.kernels.softcap import tangent_exp2

PER = gl.constexpr(2)  # tiles of a slot


@gluon.jit
def partial_sums(e):
    """[ROWS, 8]: of columns that a thread has."""
    return gl.sum(gl.reshape(e, [e.shape[0], e.shape[1] // 8, 8]), 1)


@gluon.jit
def tile_weights(
    s, total, behind, scales, left: gl.constexpr, MASKED: gl.constexpr, ONES: gl.constexpr
):
    """Weights of a tile of scores [ROWS, SUB], as an operand, and the rows' sums. ``behind``: by
    how much its first key is behind the group's first query."""
    factor, inner = scales
    layout: gl.constexpr = s.type.layout
    e = tangent_exp2(s, inner, factor)
    if MASKED:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
        e = gl.where(keys[None, :] <= (rows + behind)[:, None], e, 0.0)
    if not ONES:
        total += partial_sums(e)
    return gl.convert_layout(e.to(gl.bfloat16), left), total


@gluon.jit
def scores_of(q, k_tiles, at):
    """Asks for a tile's scores [ROWS, SUB]."""
    SUB: gl.constexpr = k_tiles.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUB, 16])
    zero = gl.zeros([ROWS, SUB], gl.float32, layout)
    return warpgroup_mma(q, turned(k_tiles, at), zero, use_acc=False, is_async=True)


@gluon.jit
def added(weights, v, out, total, ones, ONES: gl.constexpr):
    """Asks for a tile's part of out, and with ONES for that of its rows' sums."""
    out = warpgroup_mma(weights, v, out, is_async=True)
    if ONES:
        layout: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
        total = warpgroup_mma(gl.convert_layout(weights, layout), ones, total, is_async=True)
    return out, total


@gluon.jit
def waited(out, total, ONES: gl.constexpr):
    """Both, once nothing is in flight."""
    if ONES:
        out, total = warpgroup_mma_wait(0, [out, total])
    else:
        out = warpgroup_mma_wait(0, [out])
    return out, total


@gluon.jit
def group_block(
    q, ones, rings, gone, output, lse_out, index, pair, begin, base, end, sizes, scales, strides,
    ONES: gl.constexpr,
):  # fmt: skip
    """A group's rows of a block of queries that begins at ``begin``. Slots are counted from the
    program's first: the block's are ``base`` to ``end``."""
    k_tiles, v_tiles, ready, free = rings
    heads, length = sizes
    stages: gl.constexpr = ready.shape[0]
    SUB: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUB, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    first = begin + index * ROWS
    last = first // SUB  # the tile that the diagonal cuts
    start = end - 1 - last // PER  # its slot
    lower = last % PER  # tiles of this slot before it
    out = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    if ONES:
        one_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
        total = gl.zeros([ROWS, 8], gl.float32, one_layout)
    else:
        total = partial_sums(gl.zeros([ROWS, SUB], gl.float32, layout))
    for i in range(base, start):  # of groups further down
        mbarrier.wait(ready.index(i % stages), i // stages & 1)
        mbarrier.arrive(free.index(i % stages), count=1)
    slot = start % stages
    mbarrier.wait(ready.index(slot), start // stages & 1)
    for up in range(lower):
        s = scores_of(q, k_tiles, slot * PER + lower - up)
        s = warpgroup_mma_wait(0, [s])
        weights, total = tile_weights(s, total, first - (last - up) * SUB, scales, left, True, ONES)
        out, total = added(weights, flat(v_tiles, slot * PER + lower - up), out, total, ones, ONES)
        out, total = waited(out, total, ONES)
    s = scores_of(q, k_tiles, slot * PER)
    s = warpgroup_mma_wait(0, [s])
    weights, total = tile_weights(s, total, first - (last - lower) * SUB, scales, left, True, ONES)
    i = gl.minimum(start + 1, end - 1)
    mbarrier.wait(ready.index(i % stages), i // stages & 1)
    s = scores_of(q, k_tiles, i % stages * PER + PER - 1)
    s = warpgroup_mma_wait(0, [s])
    for i in range(start + 1, end):
        slot = i % stages
        for j in gl.static_range(PER):
            before = (i - 1) % stages * PER if j == 0 else slot * PER + PER - j
            sums, summing = added(weights, flat(v_tiles, before), out, total, ones, ONES)
            if j < PER - 1:
                more = scores_of(q, k_tiles, slot * PER + PER - 2 - j)
            else:
                next_i = gl.minimum(i + 1, end - 1)  # after the last, again
                later = next_i % stages
                mbarrier.wait(ready.index(later), next_i // stages & 1)
                more = scores_of(q, k_tiles, later * PER + PER - 1)
            s = warpgroup_mma_wait(3, [s])  # waits for nothing: what is asked for is not needed yet
            weights, total = tile_weights(s, total, 0, scales, left, False, ONES)
            if ONES:
                s, out, total = warpgroup_mma_wait(0, [more, sums, summing])
            else:
                s, out = warpgroup_mma_wait(0, [more, sums])
            if j == 0:
                mbarrier.arrive(free.index((i - 1) % stages), count=1)
    slot = (end - 1) % stages
    out, total = added(weights, flat(v_tiles, slot * PER), out, total, ones, ONES)
    out, total = waited(out, total, ONES)
    mbarrier.arrive(free.index(slot), count=1)
    mbarrier.arrive(gone, count=1)
    summed = gl.max(total, 1) if ONES else gl.sum(total, 1)  # with ONES columns are the same
    summed = gl.convert_layout(summed, gl.SliceLayout(1, sum_layout))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sum_layout))
    gl.store(lse_out + pair.to(gl.int64) * length + first + rows, gl.log2(summed))
    out = out * (1.0 / summed)[:, None]
    store_rows(output, out, first, pair // heads, pair % heads, strides)
