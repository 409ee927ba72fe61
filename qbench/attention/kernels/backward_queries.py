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


@triton.jit
def delta_sweep(
    q, g, rows, begin, end,
    k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window, scale,
    k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    TMA: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr,
):  # fmt: skip
    """D = Σ p · dP of each row, in float32: for rows where dO · o, of a rounded o, is too coarse,
    see SMALL_LSE. Nothing overflows there without a maximum; of other rows the result is void."""
    delta = tl.zeros([M], tl.float32)
    total = tl.zeros([M], tl.float32)
    highest = tl.zeros([M], tl.float32)
    for start in tl.range(begin, end, N, num_stages=1):
        k = load_rows(
            k_source, batch, kv_head, start, stop_k, k_b, k_h, k_t, N, D, D_BLOCK, True, TMA
        )
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = load_rows(
            v_source, batch, kv_head, start, stop_k, v_b, v_h, v_t, N, DV, DV_BLOCK, True, TMA
        )
        dp = tl.dot(g, v.T, input_precision="ieee")
        keys = start + tl.arange(0, N)
        seen = visible(
            rows[:, None], keys[None, :], stop_q, stop_k, shift, window,
            mask, batch, head, mask_b, mask_h, mask_t, mask_k, CAUSAL, WINDOW, HAS_MASK,
        )  # fmt: skip
        # Their lse, from a fast logarithm, would be wrong by more than float32 is.
        above, below = terms(tl.where(seen, scores * scale, 0.0), 0.0, NORMALIZER, True)
        delta += tl.sum(tl.maximum(above, 0.0) * dp, 1)
        total += tl.sum(below, 1)
        highest = tl.maximum(highest, tl.max(above, 1))
    return delta / (total + EPSILON * (1 + highest))  # ε · e^m


@triton.jit
def query_sweep(
    dq, q, g, lse, delta, rows, begin, end,
    k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window, scale,
    k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from ``begin`` to ``end`` give to the gradients of a block of queries."""
    for start in tl.range(begin, end, N, num_stages=STAGES):
        k = load_rows(
            k_source, batch, kv_head, start, stop_k, k_b, k_h, k_t, N, D, D_BLOCK, MASKED, TMA
        )
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = load_rows(
            v_source, batch, kv_head, start, stop_k, v_b, v_h, v_t, N, DV, DV_BLOCK, MASKED, TMA
        )
        dp = tl.dot(g, v.T, input_precision="ieee")
        # The weights themselves are not needed here, so neither is their precise form.
        e, _ = recomputed(scores, scale, lse[:, None], NORMALIZER, False)
        ds = score_gradient(e, scores, dp, delta[:, None], NORMALIZER)
        if MASKED:
            keys = start + tl.arange(0, N)
            seen = visible(
                rows[:, None], keys[None, :], stop_q, stop_k, shift, window,
                mask, batch, head, mask_b, mask_h, mask_t, mask_k, CAUSAL, WINDOW, HAS_MASK,
            )  # fmt: skip
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(narrowed(ds, k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["queries", "keys", "window", "mask_b", "mask_h", "mask_t"])
def query_kernel(
    q_source, k_source, v_source, g_source, output, lse_source, deltas, dq_out, mask, spans,
    heads, group, queries, keys, window, scale, score_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t,
    dq_b, dq_h, dq_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    SPANS: tl.constexpr, NEAR_ZERO: tl.constexpr, TMA: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of M queries, and their D."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1) % heads
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // heads, queries, keys, SPANS
    )
    first = start_q + block * M
    if first >= stop_q:
        return
    kv_head = head // group
    rows = first + tl.arange(0, M)
    q = load_rows(q_source, batch, head, first, stop_q, q_b, q_h, q_t, M, D, D_BLOCK, True, False)
    g = load_rows(g_source, batch, head, first, stop_q, g_b, g_h, g_t, M, DV, DV_BLOCK, True, False)
    o = load_rows(output, batch, head, first, stop_q, o_b, o_h, o_t, M, DV, DV_BLOCK, True, False)
    row_offset = (wide(batch) * heads + head) * queries
    lse = tl.load(lse_source + row_offset + rows, mask=rows < stop_q, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)

    begin = start_k
    end = stop_k
    whole_end = stop_k
    if CAUSAL:
        end = tl.minimum(stop_k, tl.minimum(first + M, stop_q) + shift)
        whole_end = tl.minimum(stop_k, first + shift + 1)
    if WINDOW:
        begin = tl.maximum(begin, first + shift - window + 1)
    whole_begin = begin
    if WINDOW:
        whole_begin += tl.cdiv(tl.maximum(0, first + M + shift - window - begin), N) * N
    whole_end = whole_begin + tl.maximum(0, whole_end - whole_begin) // N * N
    if HAS_MASK:
        whole_begin = begin
        whole_end = begin

    if NEAR_ZERO and o.dtype != tl.float32:
        small = lse < SMALL_LSE
        if tl.max(small.to(tl.int32)) > 0:
            exact = delta_sweep(
                q, g, rows, begin, end,
                k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window,
                score_scale, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
                NORMALIZER, CAUSAL, WINDOW, HAS_MASK, TMA, M, N, D, D_BLOCK, DV, DV_BLOCK,
            )  # fmt: skip
            delta = tl.where(small, exact, delta)
    tl.store(deltas + row_offset + rows, delta, mask=rows < stop_q)

    dq = tl.zeros([M, D_BLOCK], tl.float32)
    if WINDOW:
        dq = query_sweep(
            dq, q, g, lse, delta, rows, begin, whole_begin,
            k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window,
            score_scale, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
            NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, TMA, N, D, D_BLOCK, DV, DV_BLOCK, STAGES,
        )  # fmt: skip
    if not HAS_MASK:
        dq = query_sweep(
            dq, q, g, lse, delta, rows, whole_begin, whole_end,
            k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window,
            score_scale, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
            NORMALIZER, CAUSAL, WINDOW, HAS_MASK, False, TMA, N, D, D_BLOCK, DV, DV_BLOCK, STAGES,
        )  # fmt: skip
    dq = query_sweep(
        dq, q, g, lse, delta, rows, whole_end, end,
        k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window,
        score_scale, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
        NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, TMA, N, D, D_BLOCK, DV, DV_BLOCK, STAGES,
    )  # fmt: skip
    pointers = dq_out + wide(batch) * dq_b + wide(head) * dq_h
    columns = tl.arange(0, D_BLOCK)
    tl.store(
        pointers + wide(rows)[:, None] * dq_t + columns[None, :],
        narrowed(dq * scale, dq_out.dtype.element_ty),
        mask=(rows[:, None] < stop_q) & (columns[None, :] < D),
    )
