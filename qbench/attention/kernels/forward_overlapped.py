"""The forward pass over whole tiles, the products of two tiles at a time.

While the tensor cores multiply a tile's weights by its values, the next tile's weights are
computed: its scores are asked for first. For kernels without a running maximum only, as nothing
that a tile gives then depends on the tile before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import load_rows, rounded, terms
from qbench.attention.kernels.modes import SHAPED, SUMLESS
from qbench.attention.kernels.scores import row_scores
from qbench.attention.kernels.sigmoid import sigmoid


@triton.jit
def weigh(
    scores, total, maximum, rows, start, scale, shaping, limits, dtype: tl.constexpr,
    FAMILY: tl.constexpr, MODES: tl.constexpr, NEAR_ZERO: tl.constexpr, FUSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    gain, inner, slope, level = shaping
    if SHAPED & MODES:
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        own = rows[:, None] + limits[2]
        scores = row_scores(
            scores, keys[None, :], own, start, gain, inner, slope, level, MODES, FUSED
        )
    if SUMLESS & MODES:
        above = sigmoid(scores, FUSED, MODES)
    else:
        above, below = terms(scores * scale, 0.0, FAMILY, False)  # [BLOCK_Q, BLOCK_K] each
        groups: tl.constexpr = BLOCK_K // 8
        shape: tl.constexpr = [scores.shape[0], groups, 8]
        total += tl.sum(tl.reshape(below, shape), 1)  # [BLOCK_Q, 8]
        if NEAR_ZERO:
            highest = tl.max(tl.reshape(scores, shape), 1)
            maximum = tl.maximum(maximum, highest)  # [BLOCK_Q, 8]
    return rounded(above, dtype, FAMILY, FUSED), total, maximum


@triton.jit
def overlapped_sweep(
    acc, total, maximum, q, rows, begin, end, k_source, v_source, scale, shaping,
    k_strides, v_strides, index, limits,
    FAMILY: tl.constexpr, MODES: tl.constexpr, NEAR_ZERO: tl.constexpr, TMA: tl.constexpr,
    FUSED: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As :func:`qbench.attention.kernels.forward.sweep`."""
    batch, _, kv_head = index
    stop_k = limits[1]
    dtype: tl.constexpr = q.dtype
    if begin < end:
        k = load_rows(  # [BLOCK_K, BLOCK_D]
            k_source, batch, kv_head, begin, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
            False, TMA,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        weights, total, maximum = weigh(
            scores, total, maximum, rows, begin, scale, shaping, limits, dtype,
            FAMILY, MODES, NEAR_ZERO, FUSED, BLOCK_K,
        )  # fmt: skip
        for start in tl.range(begin, end - BLOCK_K, BLOCK_K, num_stages=STAGES):
            k = load_rows(  # [BLOCK_K, BLOCK_D]
                k_source, batch, kv_head, start + BLOCK_K, stop_k, k_strides, BLOCK_K, HEAD_DIM,
                BLOCK_D, False, TMA,
            )  # fmt: skip
            scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
            v = load_rows(  # [BLOCK_K, BLOCK_DV]
                v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM, BLOCK_DV,
                False, TMA,
            )  # fmt: skip
            acc = tl.dot(weights, v, acc, input_precision="ieee")
            weights, total, maximum = weigh(
                scores, total, maximum, rows, start + BLOCK_K, scale, shaping, limits, dtype,
                FAMILY, MODES, NEAR_ZERO, FUSED, BLOCK_K,
            )  # fmt: skip
        v = load_rows(  # [BLOCK_K, BLOCK_DV]
            v_source, batch, kv_head, end - BLOCK_K, stop_k, v_strides, BLOCK_K, V_HEAD_DIM,
            BLOCK_DV, False, TMA,
        )  # fmt: skip
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    return acc, total, maximum
