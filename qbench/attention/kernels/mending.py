"""Softpick's rows of tiny scores, computed again by themselves.

A row is tiny where its largest score is positive and below SMALL_MAXIMUM. Only its weights have
lost bits. Its sum of |e^x − 1| has not, wherever it is as large as in most rows that see a key far
away: each term is right to 2^-22, and so their sum is right to SMALL_MAXIMUM of itself where it is
at least that times the number of keys. What is left are the products of its weights, which are 0
but for the few keys with a positive score. So no exponential is computed here, and no values are
read for other keys.

With ALiBi these are a row's nearest keys: one block in a hundred of a head with a steep slope has
such a row, nearly always with positive scores in the block's last tiles alone. So what came before
them is read again only where it held a positive score of such a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import CHUNK, expm1_near_zero, load_rows, rounded, visible
from qbench.attention.kernels.modes import SHAPED
from qbench.attention.kernels.scores import row_scores


@triton.jit
def set_flags(flags, start, stop_k, BLOCK_K: tl.constexpr):
    """Of each CHUNK of keys that the tile from ``start`` on has a part of."""
    last = tl.minimum(start + BLOCK_K, stop_k) - 1
    for i in tl.static_range((BLOCK_K - 1) // CHUNK + 2):
        tl.store(flags + tl.minimum(start + i * CHUNK, last) // CHUNK, 1)


@triton.jit
def mended(
    acc, tiny, earlier, flags, q, rows, begin, last_begin, end, k_source, v_source, mask, scale,
    shaping, k_strides, v_strides, mask_strides, index, limits,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, FUSED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_Q, BLOCK_DV] with the rows that are ``tiny`` as they are with the series for
    e^x − 1, and the flags of their keys set. ``earlier`` [BLOCK_Q]: a row's largest score before
    ``last_begin``, 0 if none is positive. The rest as in ``forward.sweep``, without a maximum."""
    batch, head, kv_head = index
    gain, inner, slope, level = shaping
    stop_k = limits[1]
    if tl.max(tiny.to(tl.int32)) > 0:
        acc = tl.where(tiny[:, None], 0.0, acc)
        if tl.max((tiny & (earlier > 0)).to(tl.int32)) == 0:
            begin = last_begin
        for start in tl.range(begin, end, BLOCK_K, num_stages=1):
            k = load_rows(  # [BLOCK_K, BLOCK_D]
                k_source, batch, kv_head, start, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
                True, TMA,
            )  # fmt: skip
            scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
            keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            if SHAPED & MODES:
                own = rows[:, None] + limits[2]
                scores = row_scores(
                    scores, keys[None, :], own, start, gain, inner, slope, level, MODES, FUSED
                )
            seen = visible(  # [BLOCK_Q, BLOCK_K]
                rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head,
                CAUSAL, WINDOW,
            )  # fmt: skip
            # Of the other rows nothing is added; none of these scores is above SMALL_MAXIMUM.
            scores = tl.where(seen & tiny[:, None], tl.maximum(scores * scale, 0.0), 0.0)
            if tl.max(scores) > 0:
                set_flags(flags, start, stop_k, BLOCK_K)
                v = load_rows(  # [BLOCK_K, BLOCK_DV]
                    v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM,
                    BLOCK_DV, True, TMA,
                )  # fmt: skip
                weights = rounded(expm1_near_zero(scores), v.dtype, FAMILY, FUSED)
                acc = tl.dot(weights, v, acc, input_precision="ieee")
    return acc
