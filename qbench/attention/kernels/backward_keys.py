"""Second kernel of the backward pass: gradients of keys and values, from the rows' log-sum-exp and
D. See :mod:`qbench.attention.kernels.backward_queries`."""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import (
    CHUNK,
    load_rows,
    narrowed,
    recomputed,
    rounded,
    score_gradient,
    sequence,
    visible,
    wide,
)
from qbench.attention.kernels.modes import CAPPED, RESHAPED, SCALED
from qbench.attention.kernels.scores import (
    cap_slope,
    head_factor,
    log2_length,
    reshaped,
    row_factor,
    slope_of,
)

MOST_CHUNKS = tl.constexpr(4)  # that a block of keys has a part of


@triton.jit
def key_sweep(
    dk, dv, k, v, keys, begin, end, q_source, g_source, lse_row, delta_row, mask, counts,
    scale, shaping, q_strides, g_strides, mask_strides, batch, head, limits,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, PRECISE: tl.constexpr, FUSED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from ``begin`` to ``end`` give to the gradients of a block of keys:
    dk [BLOCK_K, BLOCK_D] and dv [BLOCK_K, BLOCK_DV]. ``shaping``: where the sequence's keys begin,
    and what the scores of the head are made with."""
    stop_q = limits[0]
    start_k, inner, slope, factor, value_row = shaping
    for start in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
        q = load_rows(  # [BLOCK_Q, BLOCK_D]
            q_source, batch, head, start, stop_q, q_strides, BLOCK_Q, HEAD_DIM, BLOCK_D,
            MASKED, TMA,
        )  # fmt: skip
        if MASKED:  # a row beyond the last has lse +∞, so all its weights are 0
            lse = tl.load(lse_row + rows, mask=rows < stop_q, other=float("inf"))  # [BLOCK_Q]
            delta = tl.load(delta_row + rows, mask=rows < stop_q, other=0.0)  # [BLOCK_Q]
        else:
            lse = tl.load(lse_row + rows)
            delta = tl.load(delta_row + rows)
        scores = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        g = load_rows(  # [BLOCK_Q, BLOCK_DV]
            g_source, batch, head, start, stop_q, g_strides, BLOCK_Q, V_HEAD_DIM, BLOCK_DV,
            MASKED, TMA,
        )  # fmt: skip
        dp = tl.dot(v, g.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        unit = scale
        products = scores
        gain = scale
        row_slope = slope
        if RESHAPED & MODES:
            unit = 1.0
            if SCALED & MODES:
                length = log2_length(
                    rows, value_row, limits, start_k, counts, MODES, CAUSAL, WINDOW
                )
                gain = row_factor(length, factor, scale, MODES)[None, :]  # [1, BLOCK_Q]
                row_slope = row_factor(length, factor, slope, MODES)[None, :]  # [1, BLOCK_Q]
            own = rows[None, :] + limits[2]
            scores, products = reshaped(
                scores, keys[:, None], own, start + limits[2], gain, inner, row_slope, MODES, FUSED
            )
        # [BLOCK_K, BLOCK_Q]
        e, weight = recomputed(scores, unit, lse[None, :], FAMILY, MODES, PRECISE, FUSED)
        if MASKED:
            seen = visible(  # [BLOCK_K, BLOCK_Q]
                rows[None, :], keys[:, None], limits, mask, mask_strides, batch, head,
                CAUSAL, WINDOW,
            )  # fmt: skip
            e = tl.where(seen, e, 0.0)
            weight = tl.where(seen, weight, 0.0)
        # The tensor cores add to dv while the scores' gradients are computed.
        dv = tl.dot(rounded(weight, g.dtype, FAMILY, FUSED), g, dv, input_precision="ieee")
        ds = score_gradient(e, scores, dp, delta[None, :], FAMILY)  # [BLOCK_K, BLOCK_Q]
        if CAPPED & MODES:
            ds = ds * cap_slope(products, MODES, FUSED)
        if SCALED & MODES:
            ds = ds * (gain / scale)
        dk = tl.dot(narrowed(ds, q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["queries", "keys_total", "window", "mask_b", "mask_h", "mask_t"])
def key_kernel(
    q_source, k_source, v_source, g_source, lse_source, deltas, imprecise, dk_out, dv_out,
    mask, spans, slopes, s, counts,
    head_counts, queries, keys_total, window, scale, score_scale, inner, strides,
    mask_b, mask_h, mask_t, mask_k,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    NEAR_ZERO: tl.constexpr, PRECISE: tl.constexpr, FUSED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of BLOCK_K keys and values, over all query heads that share them.
    ``head_counts``: key heads, and how many query heads share one. ``strides``: of q, k, v, dO, dk
    and dv; see :func:`qbench.attention.kernels.forward.forward_kernel`."""
    kv_heads, group = head_counts
    q_strides, k_strides, v_strides, g_strides, dk_strides, dv_strides = strides
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    kv_head = tl.program_id(1) % kv_heads
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // kv_heads, queries, keys_total
    )
    first = start_k + tl.program_id(0) * BLOCK_K
    if first >= stop_k:
        return
    limits = (stop_q, stop_k, shift, window)
    keys = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    k = load_rows(  # [BLOCK_K, BLOCK_D]
        k_source, batch, kv_head, first, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D, True, False
    )
    v = load_rows(  # [BLOCK_K, BLOCK_DV]
        v_source, batch, kv_head, first, stop_k, v_strides, BLOCK_K, V_HEAD_DIM, BLOCK_DV,
        True, False,
    )  # fmt: skip
    begin = start_q
    end = stop_q
    if CAUSAL:
        begin = tl.maximum(begin, first - shift)
    whole_begin = begin
    if CAUSAL:
        partly = tl.maximum(0, first + BLOCK_K - 1 - shift - begin)
        whole_begin += tl.cdiv(partly, BLOCK_Q) * BLOCK_Q
    whole_end = end
    if WINDOW:
        end = tl.minimum(end, first + BLOCK_K - 1 - shift + window)
        whole_end = tl.minimum(end, first - shift + window)
    whole_end = whole_begin + tl.maximum(0, whole_end - whole_begin) // BLOCK_Q * BLOCK_Q
    if mask is not None:
        whole_begin = begin
        whole_end = begin

    # Where the forward pass met rows of tiny scores, weights need the series for e^x − 1.
    if NEAR_ZERO and not PRECISE:
        chunk = first // CHUNK + tl.arange(0, MOST_CHUNKS)
        here = chunk <= (tl.minimum(first + BLOCK_K, stop_k) - 1) // CHUNK
        flags = imprecise + (wide(batch) * kv_heads + kv_head) * tl.cdiv(keys_total, CHUNK)
        tl.static_assert(BLOCK_K <= (MOST_CHUNKS - 1) * CHUNK)
        careful = tl.max(tl.load(flags + chunk, mask=here, other=0)) != 0
    else:
        careful = PRECISE
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        offset = (wide(batch) * kv_heads * group + head) * queries
        slope = slope_of(head, slopes, MODES)
        shaping = (start_k, inner, slope, head_factor(head, s, MODES), offset)
        if careful:
            dk, dv = key_sweep(
                dk, dv, k, v, keys, begin, end,
                q_source, g_source, lse_source + offset, deltas + offset, mask, counts,
                score_scale, shaping, q_strides, g_strides, mask_strides, batch, head, limits,
                FAMILY, MODES, CAUSAL, WINDOW, True, True, FUSED, TMA,
                BLOCK_Q, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, 1,
            )  # fmt: skip
        else:
            if CAUSAL and mask is None:
                dk, dv = key_sweep(
                    dk, dv, k, v, keys, begin, tl.minimum(whole_begin, end),
                    q_source, g_source, lse_source + offset, deltas + offset, mask, counts,
                    score_scale, shaping, q_strides, g_strides, mask_strides, batch, head, limits,
                    FAMILY, MODES, CAUSAL, WINDOW, True, False, FUSED, TMA,
                    BLOCK_Q, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, STAGES,
                )  # fmt: skip
            if mask is None:
                dk, dv = key_sweep(
                    dk, dv, k, v, keys, whole_begin, whole_end,
                    q_source, g_source, lse_source + offset, deltas + offset, mask, counts,
                    score_scale, shaping, q_strides, g_strides, mask_strides, batch, head, limits,
                    FAMILY, MODES, CAUSAL, WINDOW, False, False, FUSED, TMA,
                    BLOCK_Q, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, STAGES,
                )  # fmt: skip
            dk, dv = key_sweep(
                dk, dv, k, v, keys, whole_end, end,
                q_source, g_source, lse_source + offset, deltas + offset, mask, counts,
                score_scale, shaping, q_strides, g_strides, mask_strides, batch, head, limits,
                FAMILY, MODES, CAUSAL, WINDOW, True, False, FUSED, TMA,
                BLOCK_Q, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, STAGES,
            )  # fmt: skip

    pointers = dk_out + wide(batch) * dk_strides[0] + wide(kv_head) * dk_strides[1]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    tl.store(
        pointers + wide(keys)[:, None] * dk_strides[2] + columns[None, :],
        narrowed(dk * scale, dk_out.dtype.element_ty),
        mask=(keys[:, None] < stop_k) & (columns[None, :] < HEAD_DIM),
    )
    pointers = dv_out + wide(batch) * dv_strides[0] + wide(kv_head) * dv_strides[1]
    columns = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    tl.store(
        pointers + wide(keys)[:, None] * dv_strides[2] + columns[None, :],
        narrowed(dv, dv_out.dtype.element_ty),
        mask=(keys[:, None] < stop_k) & (columns[None, :] < V_HEAD_DIM),
    )
