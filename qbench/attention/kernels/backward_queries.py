"""Backward pass: the kernel of the queries' gradients, then that of the keys' and values', in
:mod:`qbench.attention.kernels.backward_keys`.

Both recompute the weights from the rows' log-sum-exp; the first also writes D = dO · o of each row,
which the second needs. Each program alone writes what it computes, in a fixed order of additions,
so gradients are the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import (
    EPSILON,
    SMALL_LSE,
    load_rows,
    narrowed,
    recomputed,
    score_gradient,
    sequence,
    terms,
    visible,
    wide,
)
from qbench.attention.kernels.modes import (
    BIASED,
    CAPPED,
    LEARNING,
    LEARNING_SLOPES,
    RESHAPED,
    SCALED,
    SINK_LEARNED,
    SLOPED,
    SUMLESS,
)
from qbench.attention.kernels.scores import (
    LN_2,
    cap_slope,
    head_factor,
    log2_length,
    reshaped,
    row_factor,
    sink_of,
    slope_of,
    sloped,
)


@triton.jit
def delta_sweep(
    q, g, rows, begin, end, k_source, v_source, mask, scale, shaping,
    k_strides, v_strides, mask_strides, index, limits,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, FUSED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """D = Σ p · dP of each row, in float32: for rows where dO · o, of a rounded o, is too coarse,
    see SMALL_LSE. Nothing overflows there without a maximum; of other rows the result is void."""
    batch, head, kv_head = index
    stop_k = limits[1]
    gain, inner, slope = shaping[0], shaping[1], shaping[2]
    delta = tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    highest = tl.zeros([BLOCK_Q], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=1):
        k = load_rows(  # [BLOCK_K, BLOCK_D]
            k_source, batch, kv_head, start, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
            True, TMA,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        v = load_rows(  # [BLOCK_K, BLOCK_DV]
            v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM, BLOCK_DV,
            True, TMA,
        )  # fmt: skip
        dp = tl.dot(g, v.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        if RESHAPED & MODES:
            own = rows[:, None] + limits[2]
            scores, unused = reshaped(  # noqa: RUF059 (an underscore would be carried on)
                scores, keys[None, :], own, start, gain, inner, slope, MODES, FUSED
            )
        seen = visible(  # [BLOCK_Q, BLOCK_K]
            rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head, CAUSAL, WINDOW
        )
        # Their lse, from a fast logarithm, would be wrong by more than float32 is.
        above, below = terms(tl.where(seen, scores * scale, 0.0), 0.0, FAMILY, True)
        delta += tl.sum(tl.maximum(above, 0.0) * dp, 1)  # [BLOCK_Q]
        total += tl.sum(below, 1)  # [BLOCK_Q]
        highest = tl.maximum(highest, tl.max(above, 1))  # [BLOCK_Q]
    return delta / (total + EPSILON * (1 + highest))  # ε · e^m


@triton.jit
def query_sweep(
    dq, sums, tilts, q, g, lse, delta, rows, begin, end, k_source, v_source, mask, scale, shaping,
    k_strides, v_strides, mask_strides, index, limits,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from ``begin`` to ``end`` give to the gradients of a block of queries,
    dq [BLOCK_Q, BLOCK_D]; and to ``sums`` [BLOCK_Q], where the gradient of sigmoid's bias or of s
    is asked for, those of the scores, for s times the scores without s · log n; to ``tilts``
    [BLOCK_Q], where that of slopes is, those of the scores times how far the key is ahead.
    ``index``: batch row, query head and key head; ``shaping``: what scores.reshaped takes after the
    positions, then gain and slope without s · log n."""
    batch, head, kv_head = index
    stop_k = limits[1]
    gain, inner, slope, plain_gain, plain_slope = shaping
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = load_rows(  # [BLOCK_K, BLOCK_D]
            k_source, batch, kv_head, start, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
            MASKED, TMA,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        v = load_rows(  # [BLOCK_K, BLOCK_DV]
            v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM, BLOCK_DV,
            MASKED, TMA,
        )  # fmt: skip
        dp = tl.dot(g, v.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        products = scores
        if RESHAPED & MODES:
            own = rows[:, None] + limits[2]
            scores, products = reshaped(
                scores, keys[None, :], own, start, gain, inner, slope, MODES, FUSED
            )
        # The weights themselves are not needed here, so neither is their precise form.
        # [BLOCK_Q, BLOCK_K]
        e, _ = recomputed(scores, scale, lse[:, None], FAMILY, MODES, False, FUSED)
        ds = score_gradient(e, scores, dp, delta[:, None], FAMILY)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            seen = visible(  # [BLOCK_Q, BLOCK_K]
                rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head,
                CAUSAL, WINDOW,
            )  # fmt: skip
            ds = tl.where(seen, ds, 0.0)
        if LEARNING & MODES:
            if SCALED & MODES:
                plain = products * plain_gain
                if SLOPED & MODES:
                    plain = sloped(
                        plain, keys[None, :], rows[:, None] + limits[2], start, plain_slope, 0.0
                    )
                sums += tl.sum(ds * plain, 1)  # [BLOCK_Q]
            if BIASED & MODES:
                sums += tl.sum(ds, 1)  # [BLOCK_Q]
        if LEARNING_SLOPES & MODES:
            ahead = (keys[None, :] - (rows[:, None] + limits[2])).to(tl.float32)
            tilts += tl.sum(ds * ahead, 1)  # [BLOCK_Q]
        if CAPPED & MODES:
            ds = ds * cap_slope(products, MODES, FUSED)
        dq = tl.dot(narrowed(ds, k.dtype), k, dq, input_precision="ieee")
    return dq, sums, tilts


@triton.jit(do_not_specialize=["queries", "keys", "window", "mask_b", "mask_h", "mask_t"])
def query_kernel(
    q_source, k_source, v_source, g_source, output, lse_source, deltas, dq_out, row_gradients,
    row_tilts, mask, spans, sinks, slopes, s, counts,
    head_counts, queries, keys, window, scale, score_scale, inner, strides,
    mask_b, mask_h, mask_t, mask_k,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    NEAR_ZERO: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of BLOCK_Q queries, and their D. ``head_counts``: query heads, and how
    many share a key head. ``strides``: of q, k, v, dO, output and dq; see
    :func:`qbench.attention.kernels.forward.forward_kernel`. ``row_gradients`` [B, heads, queries]:
    what each row gives to the gradient of the head's bias, sink or s, where that is asked for; so
    ``row_tilts`` to that of its slope."""
    heads, group = head_counts
    q_strides, k_strides, v_strides, g_strides, o_strides, dq_strides = strides
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1) % heads
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // heads, queries, keys
    )
    first = start_q + block * BLOCK_Q
    if first >= stop_q:
        return
    index = (batch, head, head // group)
    limits = (stop_q, stop_k, shift, window)
    rows = first + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    q = load_rows(  # [BLOCK_Q, BLOCK_D]
        q_source, batch, head, first, stop_q, q_strides, BLOCK_Q, HEAD_DIM, BLOCK_D, True, False
    )
    g = load_rows(  # [BLOCK_Q, BLOCK_DV]
        g_source, batch, head, first, stop_q, g_strides, BLOCK_Q, V_HEAD_DIM, BLOCK_DV, True, False
    )
    if SUMLESS & MODES == 0:
        o = load_rows(  # [BLOCK_Q, BLOCK_DV]
            output, batch, head, first, stop_q, o_strides, BLOCK_Q, V_HEAD_DIM, BLOCK_DV,
            True, False,
        )  # fmt: skip
    offset = (wide(batch) * heads + head) * queries
    lse = tl.load(lse_source + offset + rows, mask=rows < stop_q, other=float("inf"))  # [BLOCK_Q]
    if SUMLESS & MODES:
        delta = tl.zeros([BLOCK_Q], tl.float32)
    else:
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # [BLOCK_Q]
    length = log2_length(rows, offset, limits, start_k, counts, MODES, CAUSAL, WINDOW)  # [BLOCK_Q]
    factor = head_factor(head, s, MODES)
    plain_slope = slope_of(head, slopes, MODES)
    gain = row_factor(length, factor, score_scale, MODES)
    slope = row_factor(length, factor, plain_slope, MODES)
    if SCALED & MODES:
        gain = gain[:, None]
        slope = slope[:, None]
    shaping = (gain, inner, slope, score_scale, plain_slope)
    unit = score_scale
    if RESHAPED & MODES:
        unit = 1.0

    begin = start_k
    end = stop_k
    whole_end = stop_k
    if CAUSAL:
        end = tl.minimum(stop_k, tl.minimum(first + BLOCK_Q, stop_q) + shift)
        whole_end = tl.minimum(stop_k, first + shift + 1)
    if WINDOW:
        begin = tl.maximum(begin, first + shift - window + 1)
    whole_begin = begin
    if WINDOW:
        partly = tl.maximum(0, first + BLOCK_Q + shift - window - begin)
        whole_begin += tl.cdiv(partly, BLOCK_K) * BLOCK_K
    whole_end = whole_begin + tl.maximum(0, whole_end - whole_begin) // BLOCK_K * BLOCK_K
    if mask is not None:
        whole_begin = begin
        whole_end = begin

    if NEAR_ZERO and g.dtype != tl.float32:
        small = lse < SMALL_LSE
        if tl.max(small.to(tl.int32)) > 0:
            exact = delta_sweep(
                q, g, rows, begin, end, k_source, v_source, mask, unit, shaping,
                k_strides, v_strides, mask_strides, index, limits,
                FAMILY, MODES, CAUSAL, WINDOW, TMA, FUSED, BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D,
                V_HEAD_DIM, BLOCK_DV,
            )  # fmt: skip
            delta = tl.where(small, exact, delta)
    if SUMLESS & MODES == 0:
        tl.store(deltas + offset + rows, delta, mask=rows < stop_q)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_Q], tl.float32)
    tilts = tl.zeros([BLOCK_Q], tl.float32)
    if WINDOW:
        dq, sums, tilts = query_sweep(
            dq, sums, tilts, q, g, lse, delta, rows, begin, whole_begin, k_source, v_source, mask,
            unit, shaping, k_strides, v_strides, mask_strides, index, limits,
            FAMILY, MODES, CAUSAL, WINDOW, True, TMA, FUSED, BLOCK_K, HEAD_DIM, BLOCK_D, V_HEAD_DIM,
            BLOCK_DV, STAGES,
        )  # fmt: skip
    if mask is None:
        dq, sums, tilts = query_sweep(
            dq, sums, tilts, q, g, lse, delta, rows, whole_begin, whole_end, k_source, v_source,
            mask, unit, shaping, k_strides, v_strides, mask_strides, index, limits,
            FAMILY, MODES, CAUSAL, WINDOW, False, TMA, FUSED, BLOCK_K, HEAD_DIM, BLOCK_D,
            V_HEAD_DIM, BLOCK_DV, STAGES,
        )  # fmt: skip
    dq, sums, tilts = query_sweep(
        dq, sums, tilts, q, g, lse, delta, rows, whole_end, end, k_source, v_source, mask, unit,
        shaping, k_strides, v_strides, mask_strides, index, limits,
        FAMILY, MODES, CAUSAL, WINDOW, True, TMA, FUSED, BLOCK_K, HEAD_DIM, BLOCK_D, V_HEAD_DIM,
        BLOCK_DV, STAGES,
    )  # fmt: skip
    if LEARNING & MODES:
        if SINK_LEARNED & MODES:
            sums = -tl.math.exp2(sink_of(head, sinks, MODES) - lse) * delta
        if SCALED & MODES:
            sums = sums * (length * (LN_2 * LN_2))
        tl.store(row_gradients + offset + rows, sums, mask=rows < stop_q)
    if LEARNING_SLOPES & MODES:
        tilts = row_factor(length, factor, tilts, MODES)
        tl.store(row_tilts + offset + rows, tilts, mask=rows < stop_q)
    if SCALED & MODES:
        dq = dq * (gain / score_scale)
    pointers = dq_out + wide(batch) * dq_strides[0] + wide(head) * dq_strides[1]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    tl.store(
        pointers + wide(rows)[:, None] * dq_strides[2] + columns[None, :],
        narrowed(dq * scale, dq_out.dtype.element_ty),
        mask=(rows[:, None] < stop_q) & (columns[None, :] < HEAD_DIM),
    )
