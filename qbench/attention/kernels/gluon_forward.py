"""Forward pass of the plain causal bf16 case of families that need no sums of their rows: sigmoid.

As the backward kernels in :mod:`qbench.attention.kernels.gluon_backward`: one warp loads tiles
ahead, two groups of four warps hold 64 rows each. A group asks for the next tile's scores before
it hands this tile's weights to the tensor cores, and computes the next weights while these are
multiplied by the values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from qbench.attention.kernels import modes
from qbench.attention.kernels.gluon_backward import of_rows
from qbench.attention.kernels.gluon_family import (
    BLOCK,
    ROWS,
    below_lse,
    exponential,
    flat,
    store_rows,
    turned,
)
from qbench.attention.kernels.relaunch import described, launch
from qbench.attention.kernels.scores import LOG2_E, slope_of
from qbench.attention.kernels.settings import Parameters, factors
from qbench.attention.kernels.tiles import Tile


def forward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    parameters: Parameters, family: str, asked: int, scale: float, softcap: float, tile: Tile,
) -> None:  # fmt: skip
    """Fills output and lse; for what :func:`fits` says."""
    batch, heads, length, width = query.shape
    keys = tile.block_k
    _, bias, slopes, _ = parameters
    sources = [described(of_rows, query, 64)]
    sources += [described(of_rows, tensor, keys) for tensor in (key, value)]
    launch(
        forward_kernel, (length // 128, batch * heads), query.device.index,
        [*sources, output, lse, lse if bias is None else bias, lse if slopes is None else slopes],
        ((heads, heads // key.shape[1], length), factors(scale, softcap), output.stride()[:3]),
        {"FAMILY": family, "MODES": asked, "OF_LENGTH": bias is None, "HEAD_DIM": width,
         "BLOCK_K": keys, "STAGES": tile.stages, "num_warps": 4},
    )  # fmt: skip


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, asked: int) -> bool:
    """Whether the kernel here is for such tensors, where there is no mask and no spans."""
    batch, heads, length, width = query.shape
    return (
        causal
        and asked & modes.SUMLESS.value != 0
        and asked & modes.SCALED.value == 0
        and window == 0
        and query.dtype == torch.bfloat16
        and width in (64, 128)
        and width == value.shape[3]
        and key.shape[:3] == query.shape[:3]  # shared keys were not tried on a GPU
        and length % 128 == 0
        and batch * heads * length < 2**31
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


@gluon.jit
def forward_loader(sources, own, rings, here, sizes, BLOCK_K: gl.constexpr):
    q_source, k_source, v_source = sources
    k_tiles, k_ready, k_free, v_tiles, v_ready, v_free = rings
    heads, group, _ = sizes
    stages: gl.constexpr = k_tiles.shape[0]
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK
    batch = pair // heads
    head = pair % heads
    mbarrier.expect(here, 2 * q_source.block_type.nbytes)
    for i in gl.static_range(2):
        at = [batch, head, first + i * ROWS, 0]
        tma.async_copy_global_to_shared(q_source, at, here, own.index(i))
    count = (first + BLOCK) // BLOCK_K
    for i in range(count):  # from the diagonal to the first key
        slot = i % stages
        at = [batch, head // group, (count - 1 - i) * BLOCK_K, 0]
        phase = (i // stages & 1) ^ 1
        mbarrier.wait(k_free.index(slot), phase)
        mbarrier.expect(k_ready.index(slot), k_source.block_type.nbytes)
        tma.async_copy_global_to_shared(k_source, at, k_ready.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_free.index(slot), phase)
        mbarrier.expect(v_ready.index(slot), v_source.block_type.nbytes)
        tma.async_copy_global_to_shared(v_source, at, v_ready.index(slot), v_tiles.index(slot))


@gluon.jit
def tile_weights(
    s, behind, level, shaping, left: gl.constexpr,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of a tile of scores [ROWS, BLOCK_K], as an operand. ``behind``: by how much its first
    key is behind the group's first query; ``shaping``: what products are multiplied by, and before
    a soft cap's tanh, and the slope."""
    scale, inner, slope = shaping
    layout: gl.constexpr = s.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    z, sign, unused = below_lse(  # noqa: RUF059 (an underscore would be carried on)
        s, (rows + behind)[:, None], keys[None, :], 1.0, scale, inner, slope, level[:, None],
        FAMILY, MODES,
    )  # fmt: skip
    weights = exponential(z, sign, FAMILY, MODES)
    if MASKED:
        weights = gl.where(keys[None, :] <= (rows + behind)[:, None], weights, 0.0)
    return gl.convert_layout(weights.to(gl.bfloat16), left)


@gluon.jit
def forward_step(
    out, s, q, tile, count, behind, level, rings, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds this tile, whose scores are ``s``, to out, and gives the next one's scores. Nothing
    waits for a product that has just been asked for. After the last tile it is asked for again."""
    k_tiles, k_ready, k_free, v_tiles, v_ready, v_free = rings
    stages: gl.constexpr = k_tiles.shape[0]
    BLOCK_K: gl.constexpr = k_tiles.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_tiles.shape[4], 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    later = gl.minimum(tile + 1, count - 1)
    slot = later % stages
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, layout)
    mbarrier.wait(k_ready.index(slot), later // stages & 1)
    more = warpgroup_mma(q, turned(k_tiles, slot), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(2, [s])  # waits for nothing; it ends what the assembler takes as one
    weights = tile_weights(s, behind, level, shaping, left, FAMILY, MODES, MASKED)
    mbarrier.wait(v_ready.index(tile % stages), tile // stages & 1)
    out = warpgroup_mma(weights, flat(v_tiles, tile % stages), out, is_async=True)
    more = warpgroup_mma_wait(1, [more])
    mbarrier.arrive(k_free.index(slot), count=1)
    before = gl.maximum(tile - 1, 0) % stages
    mbarrier.arrive(v_free.index(before), count=1, pred=tile > 0)
    return out, more


@gluon.jit
def forward_rows(
    own, rings, here, output, lse_out, bias, of_head, index, sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, OF_LENGTH: gl.constexpr,
):  # fmt: skip
    k_tiles, k_ready, k_free = rings[0], rings[1], rings[2]
    heads, _, length = sizes
    scale, inner = scales
    shaping = (scale, inner, of_head)
    BLOCK_K: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    pair = gl.program_id(1)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK + index * ROWS
    batch = pair // heads
    head = pair % heads
    count = (first - index * ROWS + BLOCK) // BLOCK_K
    if OF_LENGTH:
        level = gl.log2((first + rows + 1).to(gl.float32))  # [ROWS]
    else:
        level = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        level = level - gl.load(bias + head) * LOG2_E
    gl.store(lse_out + pair.to(gl.int64) * length + first + rows, level)
    mbarrier.wait(here, 0)
    q = flat(own, index).load(gl.DotOperandLayout(0, layout, 2))
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, layout)
    out = gl.zeros([ROWS, HEAD_DIM], gl.float32, sum_layout)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(q, turned(k_tiles, 0), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_free.index(0), count=1)
    behind = first - (count - 1) * BLOCK_K
    sums = warpgroup_mma_init(out)
    for early in gl.static_range(2):  # the tiles that the diagonal cuts, for one group or the other
        sums, s = forward_step(
            sums, s, q, early, count, behind + early * BLOCK_K, level, rings, shaping,
            FAMILY, MODES, True,
        )  # fmt: skip
    for two in range(2, count, 2):  # by twos: what is in flight keeps its registers
        for i in gl.static_range(2):
            sums, s = forward_step(
                sums, s, q, two + i, count, behind + (two + i) * BLOCK_K, level, rings, shaping,
                FAMILY, MODES, False,
            )  # fmt: skip
    out = warpgroup_mma_wait(0, [sums])
    store_rows(output, out, first, batch, head, strides)


@gluon.jit
def forward_kernel(
    q_source, k_source, v_source, output, lse_out, bias, slopes, sizes, scales, strides,
    FAMILY: gl.constexpr, MODES: gl.constexpr, OF_LENGTH: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``sizes``: query heads, how many share a key head, length; ``scales``: in log2 units of the
    scores, and before a soft cap's tanh; ``strides``: of output. OF_LENGTH: the bias is minus the
    logarithm of how many keys a row sees, not ``bias`` [heads]."""
    own = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, ROWS, HEAD_DIM], q_source.layout)
    k_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], k_source.layout
    )
    v_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], v_source.layout
    )
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    rings = (k_tiles, k_ready, k_free, v_tiles, v_ready, v_free)
    sources = (q_source, k_source, v_source)
    of_head = slope_of(gl.program_id(1) % sizes[0], slopes, MODES)
    gl.warp_specialize(
        [
            (forward_rows, (own, rings, here, output, lse_out, bias, of_head, 0, sizes, scales,
             strides, FAMILY, MODES, OF_LENGTH)),
            (forward_rows, (own, rings, here, output, lse_out, bias, of_head, 1, sizes, scales,
             strides, FAMILY, MODES, OF_LENGTH)),
            (forward_loader, (sources, own, rings, here, sizes, BLOCK_K)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
