"""Gluon kernel of the forward pass of soft-capped softmax, see
:mod:`qbench.attention.kernels.lasting`.

A program for each multiprocessor takes many blocks of queries. One of its warps loads tiles ahead,
the next block's too; two or three groups of four warps hold 64 rows each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from qbench.attention.kernels.gluon_capped_rows import PER, group_block
from qbench.attention.kernels.gluon_family import ROWS, flat


@gluon.jit
def item_of(turn, table, length, BLOCK: gl.constexpr):
    """Batch row × head, and first query, of a program's turn."""
    item = gl.load(table[0] + gl.program_id(0) * table[1] + 1 + turn)
    blocks = (length + BLOCK - 1) // BLOCK
    return item // blocks, item % blocks * BLOCK


@gluon.jit
def loader(sources, own, rings, q_bars, sizes, table, GROUPS: gl.constexpr):
    """Loads each turn's queries, and its keys and values from the diagonal to the first."""
    q_source, k_source, v_source = sources
    k_tiles, v_tiles, ready, free = rings
    here, gone = q_bars
    heads, length = sizes
    stages: gl.constexpr = ready.shape[0]
    SUB: gl.constexpr = k_tiles.shape[3]
    SLOT: gl.constexpr = SUB * PER
    BLOCK: gl.constexpr = GROUPS * ROWS
    base = 0
    for turn in range(gl.load(table[0] + gl.program_id(0) * table[1])):
        pair, first = item_of(turn, table, length, BLOCK)
        batch = pair // heads
        head = pair % heads
        mbarrier.wait(gone, (turn & 1) ^ 1)
        mbarrier.expect(here, GROUPS * q_source.block_type.nbytes)
        for i in gl.static_range(GROUPS):
            at = [batch, head, first + i * ROWS, 0]
            tma.async_copy_global_to_shared(q_source, at, here, own.index(i))
        count = (gl.minimum(first + BLOCK, length) + SLOT - 1) // SLOT
        for i in range(count):
            slot = (base + i) % stages
            mbarrier.wait(free.index(slot), ((base + i) // stages & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, PER * (k_source.block_type.nbytes + v_source.block_type.nbytes))
            row = (count - 1 - i) * SLOT
            for j in gl.static_range(PER):
                at = [batch, head, row + j * SUB, 0]
                tma.async_copy_global_to_shared(k_source, at, bar, k_tiles.index(slot * PER + j))
            for j in gl.static_range(PER):
                at = [batch, head, row + j * SUB, 0]
                tma.async_copy_global_to_shared(v_source, at, bar, v_tiles.index(slot * PER + j))
        base += count


@gluon.jit
def group_rows(
    own, ones, rings, q_bars, output, lse_out, index, sizes, table, scales, strides,
    GROUPS: gl.constexpr, ONES: gl.constexpr,
):  # fmt: skip
    """A group's part of all blocks of a program. Of three groups the last ones may have no rows in
    a head's last block: they let its slots go."""
    k_tiles, ready, free = rings[0], rings[2], rings[3]
    here, gone = q_bars
    length = sizes[1]
    BLOCK: gl.constexpr = GROUPS * ROWS
    stages: gl.constexpr = free.shape[0]
    SLOT: gl.constexpr = k_tiles.shape[3] * PER
    base = 0
    for turn in range(gl.load(table[0] + gl.program_id(0) * table[1])):
        pair, begin = item_of(turn, table, length, BLOCK)
        end = base + (gl.minimum(begin + BLOCK, length) + SLOT - 1) // SLOT
        mbarrier.wait(here, turn & 1)
        q = flat(own, index)
        if GROUPS == 2:  # noqa: SIM114 (this is known at compile time)
            group_block(
                q, ones, rings, gone, output, lse_out, index, pair, begin, base, end, sizes, scales,
                strides, ONES,
            )  # fmt: skip
        elif begin + index * ROWS < length:
            group_block(
                q, ones, rings, gone, output, lse_out, index, pair, begin, base, end, sizes, scales,
                strides, ONES,
            )  # fmt: skip
        else:
            mbarrier.arrive(gone, count=1)
            for i in range(base, end):
                mbarrier.wait(ready.index(i % stages), i // stages & 1)
                mbarrier.arrive(free.index(i % stages), count=1)
        base = end


@gluon.jit
def capped_kernel(
    q_source, k_source, v_source, output, lse_out, schedule, sizes, columns, scales, strides,
    HEAD_DIM: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, ONES: gl.constexpr,
):  # fmt: skip
    """``schedule``: see schedules.py, of so many ``columns``; ``sizes``: heads, length; ``scales``:
    what the tanh is multiplied by, in log2 units, and products before it; ``strides``: of output.
    ONES: sums of rows are products of the weights, as bf16, with ones."""
    own = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 1, 1, ROWS, HEAD_DIM], q_source.layout)
    k_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * PER, 1, 1, SUB, HEAD_DIM], k_source.layout
    )
    v_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * PER, 1, 1, SUB, HEAD_DIM], v_source.layout
    )
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    gone = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here, count=1)
    mbarrier.init(gone, count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    rings = (k_tiles, v_tiles, ready, free)
    q_bars = (here, gone)
    sources = (q_source, k_source, v_source)
    table = (schedule, columns)
    ones = 0
    if ONES:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, SUB], gl.bfloat16)
        by_thread: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
        places = gl.allocate_shared_memory(gl.bfloat16, [8, SUB], layout)
        places.store(gl.full([8, SUB], 1.0, gl.bfloat16, by_thread))
        fence_async_shared()
        ones = places.permute([1, 0])
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (group_rows, (own, ones, rings, q_bars, output, lse_out, 0, sizes, table, scales,
                 strides, GROUPS, ONES)),
                (group_rows, (own, ones, rings, q_bars, output, lse_out, 1, sizes, table, scales,
                 strides, GROUPS, ONES)),
                (loader, (sources, own, rings, q_bars, sizes, table, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (group_rows, (own, ones, rings, q_bars, output, lse_out, 0, sizes, table, scales,
                 strides, GROUPS, ONES)),
                (group_rows, (own, ones, rings, q_bars, output, lse_out, 1, sizes, table, scales,
                 strides, GROUPS, ONES)),
                (group_rows, (own, ones, rings, q_bars, output, lse_out, 2, sizes, table, scales,
                 strides, GROUPS, ONES)),
                (loader, (sources, own, rings, q_bars, sizes, table, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
