"""Second kernel of the backward pass: gradients of keys and values, from the rows' log-sum-exp and
D. See :mod:`qbench.attention.kernels.backward_queries`."""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import (
    load_rows,
    narrowed,
    recomputed,
    rounded,
    score_gradient,
    sequence,
    visible,
    wide,
)


@triton.jit
def key_sweep(
    dk, dv, k, v, keys, begin, end,
    q_source, g_source, lse_row, delta_row, mask, batch, head, stop_q, stop_k, shift, window,
    scale, q_b, q_h, q_t, g_b, g_h, g_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    MASKED: tl.constexpr, PRECISE: tl.constexpr, FUSED: tl.constexpr, TMA: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from ``begin`` to ``end`` give to the gradients of a block of keys."""
    for start in tl.range(begin, end, M, num_stages=STAGES):
        rows = start + tl.arange(0, M)
        q = load_rows(
            q_source, batch, head, start, stop_q, q_b, q_h, q_t, M, D, D_BLOCK, MASKED, TMA
        )
        if MASKED:  # a row beyond the last has lse +∞, so all its weights are 0
            lse = tl.load(lse_row + rows, mask=rows < stop_q, other=float("inf"))
            delta = tl.load(delta_row + rows, mask=rows < stop_q, other=0.0)
        else:
            lse = tl.load(lse_row + rows)
            delta = tl.load(delta_row + rows)
        scores = tl.dot(k, q.T, input_precision="ieee")
        g = load_rows(
            g_source, batch, head, start, stop_q, g_b, g_h, g_t, M, DV, DV_BLOCK, MASKED, TMA
        )
        dp = tl.dot(v, g.T, input_precision="ieee")
        e, weight = recomputed(scores, scale, lse[None, :], NORMALIZER, PRECISE)
        if MASKED:
            seen = visible(
                rows[None, :], keys[:, None], stop_q, stop_k, shift, window,
                mask, batch, head, mask_b, mask_h, mask_t, mask_k, CAUSAL, WINDOW, HAS_MASK,
            )  # fmt: skip
            e = tl.where(seen, e, 0.0)
            weight = tl.where(seen, weight, 0.0)
        # The tensor cores add to dv while the scores' gradients are computed.
        dv = tl.dot(rounded(weight, g.dtype, NORMALIZER, FUSED), g, dv, input_precision="ieee")
        ds = score_gradient(e, scores, dp, delta[None, :], NORMALIZER)
        dk = tl.dot(narrowed(ds, q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["queries", "keys_total", "window", "mask_b", "mask_h", "mask_t"])
def key_kernel(
    q_source, k_source, v_source, g_source, lse_source, deltas, imprecise, dk_out, dv_out,
    mask, spans,
    kv_heads, group, queries, keys_total, window, scale, score_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    SPANS: tl.constexpr, PRECISE: tl.constexpr, FUSED: tl.constexpr, TMA: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of N keys and values, over all query heads that share them."""
    kv_head = tl.program_id(1) % kv_heads
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // kv_heads, queries, keys_total, SPANS
    )
    first = start_k + tl.program_id(0) * N
    if first >= stop_k:
        return
    keys = first + tl.arange(0, N)
    k = load_rows(
        k_source, batch, kv_head, first, stop_k, k_b, k_h, k_t, N, D, D_BLOCK, True, False
    )
    v = load_rows(
        v_source, batch, kv_head, first, stop_k, v_b, v_h, v_t, N, DV, DV_BLOCK, True, False
    )
    begin = start_q
    end = stop_q
    if CAUSAL:
        begin = tl.maximum(begin, first - shift)
    whole_begin = begin
    if CAUSAL:
        whole_begin += tl.cdiv(tl.maximum(0, first + N - 1 - shift - begin), M) * M
    whole_end = end
    if WINDOW:
        end = tl.minimum(end, first + N - 1 - shift + window)
        whole_end = tl.minimum(end, first - shift + window)
    whole_end = whole_begin + tl.maximum(0, whole_end - whole_begin) // M * M
    if HAS_MASK:
        whole_begin = begin
        whole_end = begin

    # Where the forward pass met rows of tiny scores, weights need the series for e^x − 1.
    careful = tl.load(imprecise) != 0
    dk = tl.zeros([N, D_BLOCK], tl.float32)
    dv = tl.zeros([N, DV_BLOCK], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        row_offset = (wide(batch) * kv_heads * group + head) * queries
        if PRECISE or careful:
            dk, dv = key_sweep(
                dk, dv, k, v, keys, begin, end,
                q_source, g_source, lse_source + row_offset, deltas + row_offset, mask, batch, head,
                stop_q, stop_k, shift, window, score_scale,
                q_b, q_h, q_t, g_b, g_h, g_t, mask_b, mask_h, mask_t, mask_k,
                NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, True, FUSED, TMA,
                M, D, D_BLOCK, DV, DV_BLOCK, 1,
            )  # fmt: skip
        else:
            if CAUSAL and not HAS_MASK:
                dk, dv = key_sweep(
                    dk, dv, k, v, keys, begin, tl.minimum(whole_begin, end),
                    q_source, g_source, lse_source + row_offset, deltas + row_offset,
                    mask, batch, head, stop_q, stop_k, shift, window, score_scale,
                    q_b, q_h, q_t, g_b, g_h, g_t, mask_b, mask_h, mask_t, mask_k,
                    NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, False, FUSED, TMA, M, D, D_BLOCK,
                    DV, DV_BLOCK, STAGES,
                )  # fmt: skip
            if not HAS_MASK:
                dk, dv = key_sweep(
                    dk, dv, k, v, keys, whole_begin, whole_end,
                    q_source, g_source, lse_source + row_offset, deltas + row_offset,
                    mask, batch, head, stop_q, stop_k, shift, window, score_scale,
                    q_b, q_h, q_t, g_b, g_h, g_t, mask_b, mask_h, mask_t, mask_k,
                    NORMALIZER, CAUSAL, WINDOW, HAS_MASK, False, False, FUSED, TMA, M, D, D_BLOCK,
                    DV, DV_BLOCK, STAGES,
                )  # fmt: skip
            dk, dv = key_sweep(
                dk, dv, k, v, keys, whole_end, end,
                q_source, g_source, lse_source + row_offset, deltas + row_offset, mask, batch, head,
                stop_q, stop_k, shift, window, score_scale,
                q_b, q_h, q_t, g_b, g_h, g_t, mask_b, mask_h, mask_t, mask_k,
                NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, False, FUSED, TMA, M, D, D_BLOCK,
                DV, DV_BLOCK, STAGES,
            )  # fmt: skip

    pointers = dk_out + wide(batch) * dk_b + wide(kv_head) * dk_h
    columns = tl.arange(0, D_BLOCK)
    tl.store(
        pointers + wide(keys)[:, None] * dk_t + columns[None, :],
        narrowed(dk * scale, dk_out.dtype.element_ty),
        mask=(keys[:, None] < stop_k) & (columns[None, :] < D),
    )
    pointers = dv_out + wide(batch) * dv_b + wide(kv_head) * dv_h
    columns = tl.arange(0, DV_BLOCK)
    tl.store(
        pointers + wide(keys)[:, None] * dv_t + columns[None, :],
        narrowed(dv, dv_out.dtype.element_ty),
        mask=(keys[:, None] < stop_k) & (columns[None, :] < DV),
    )
