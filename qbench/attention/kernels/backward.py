"""Backward pass: the kernel of the queries' gradients, then that of the keys' and values'.

Both recompute the weights from the rows' lse; the first also writes D = dO · o of each row, which
the second needs. Each program alone writes what it computes, in a fixed order of additions, so
gradients are the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels import common, formulas
from qbench.attention.kernels.common import (
    CAPPED,
    CAUSAL,
    DPARAM,
    DSINKS,
    DSLOPES,
    ELEMENTWISE,
    NEEDS_EXPM1,
    SCALED,
    SCORE_MOD,
    SLOPED,
    VARYING,
    WINDOWED,
)
from qbench.attention.kernels.formulas import CHUNK, EPSILON, LN_2, SMALL_LSE

MAX_CHUNKS = tl.constexpr(4)  # that a block of keys has a part of


@triton.jit
def precise_delta(
    q, g, rows, begin, end, k_tensor, v_tensor, mask, scale, score_mod, mask_strides, index, limits,
    NORM: tl.constexpr, FLAGS: tl.constexpr, FAST: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return D = Σ p · dP of each row [BLOCK_Q] over the keys from ``begin`` to ``end`` in float32,
    for rows where dO · o, of a rounded o, is too coarse (see SMALL_LSE). Nothing overflows there
    without a maximum; for other rows the result is void. Arguments as in
    :func:`attn_bwd_dq_inner`."""
    batch, head, kv_head = index
    stop_k = limits[1]
    delta = tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    highest = tl.zeros([BLOCK_Q], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=1):
        k = common.load_tile(k_tensor, batch, kv_head, start, stop_k, BLOCK_K, HEAD_DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        v = common.load_tile(v_tensor, batch, kv_head, start, stop_k, BLOCK_K, V_HEAD_DIM)
        dp = tl.dot(g, v.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        if SCORE_MOD & FLAGS:
            q_pos = rows[:, None] + (limits[2] - start)
            scores = formulas.scores_of(
                scores, tl.arange(0, BLOCK_K)[None, :], q_pos, score_mod, FLAGS, FAST
            )[0]
        allowed = common.attn_mask(  # [BLOCK_Q, BLOCK_K]
            rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head, FLAGS
        )
        # Their lse, from a fast logarithm, would be wrong by more than float32 is.
        above, below = formulas.forward_terms(
            tl.where(allowed, scores * scale, 0.0), 0.0, NORM, True
        )
        delta += tl.sum(tl.maximum(above, 0.0) * dp, 1)  # [BLOCK_Q]
        total += tl.sum(below, 1)  # [BLOCK_Q]
        highest = tl.maximum(highest, tl.max(above, 1))  # [BLOCK_Q]
    return delta / (total + EPSILON * (1 + highest))  # ε · e^m


@triton.jit
def attn_bwd_dq_inner(
    dq, dparam, dslopes, q, g, lse, delta, rows, begin, end, k_tensor, v_tensor, mask, scale,
    score_mod, plain, mask_strides, index, limits,
    NORM: tl.constexpr, FLAGS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the keys from ``begin`` to ``end`` give to the gradients of a block of queries, dq
    [BLOCK_Q, HEAD_DIM]; to ``dparam`` [BLOCK_Q], if a gradient of sigmoid's bias or of s is needed:
    the gradients of the scores, for s times the scores without s · log n; to ``dslopes`` [BLOCK_Q],
    if slopes need one: the gradients of the scores times how far the key is ahead. Return the
    three. dq still lacks the factor from scores to products, which the caller applies. ``g``: dO;
    ``lse``, ``delta`` (D): of each row; ``index``: batch row, query head and key head; ``limits``:
    of common.attn_mask; ``scale``: factor of the scores to log2 units, 1 if ``score_mod``, what
    formulas.scores_of takes, has it; ``plain``: its qk_scale and slope without s · log n; MASKED:
    the tiles need a mask."""
    batch, head, kv_head = index
    stop_k = limits[1]
    plain_scale, plain_slope = plain
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = common.load_tile(k_tensor, batch, kv_head, start, stop_k, BLOCK_K, HEAD_DIM, MASKED)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        v = common.load_tile(v_tensor, batch, kv_head, start, stop_k, BLOCK_K, V_HEAD_DIM, MASKED)
        dp = tl.dot(g, v.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        tanhs = scores
        ahead = tl.arange(0, BLOCK_K)[None, :]
        q_pos = rows[:, None] + (limits[2] - start)
        if SCORE_MOD & FLAGS:
            scores, tanhs = formulas.scores_of(scores, ahead, q_pos, score_mod, FLAGS, FAST)
        # [BLOCK_Q, BLOCK_K]
        e = formulas.recompute_e(scores * scale - lse[:, None], scores, NORM, FAST, False)
        ds = formulas.score_gradient(
            e, scores, dp, delta[:, None], NORM, False
        )  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            allowed = common.attn_mask(  # [BLOCK_Q, BLOCK_K]
                rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head, FLAGS
            )
            ds = tl.where(allowed, ds, 0.0)
        if DPARAM & FLAGS:
            if SCALED & FLAGS:
                unscaled = tanhs * plain_scale
                if SLOPED & FLAGS:
                    unscaled = formulas.alibi(unscaled, ahead, q_pos, plain_slope, None)
                dparam += tl.sum(ds * unscaled, 1)  # [BLOCK_Q]
            if ELEMENTWISE & FLAGS:
                dparam += tl.sum(ds, 1)  # [BLOCK_Q]
        if DSLOPES & FLAGS:
            dslopes += tl.sum(ds * (ahead - q_pos).to(tl.float32), 1)  # [BLOCK_Q]
        if CAPPED & FLAGS:
            ds = ds * formulas.cap_gradient(tanhs)
        dq = tl.dot(formulas.cast_saturate(ds, k.dtype), k, dq, input_precision="ieee")
    return dq, dparam, dslopes


@triton.jit(do_not_specialize=VARYING)
def attn_bwd_dq(
    q_source, k_source, v_source, g_source, output, lse_source, deltas, dq_out, dparam_rows,
    dsinks_rows, dslopes_rows, mask, seq_bounds, sinks, slopes, s, counts,
    head_counts, seqlen_q, seqlen_k, window, scale, log2_scale, inv_softcap, strides,
    mask_b, mask_h, mask_t, mask_k,
    NORM: tl.constexpr, FLAGS: tl.constexpr, FAST: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of BLOCK_Q queries, and, but for sigmoid, their D, which
    goes to ``deltas`` [B, heads, seqlen_q]. ``head_counts``: query heads, and how many share a key
    head. ``strides``: of q, k, v, dO, output and dq. ``dparam_rows`` [B, heads, seqlen_q]: what
    each row gives to the gradient of the head's bias or s, if that is needed; ``dsinks_rows`` and
    ``dslopes_rows`` the same for its sink and slope. ``scale``: the scores'; ``log2_scale``,
    ``inv_softcap``: see ``ops.scales``. Other arguments as in ``forward.attn_fwd``."""
    q_strides, k_strides, v_strides, g_strides, o_strides, dq_strides = strides
    k_tensor, v_tensor = (k_source, k_strides), (v_source, v_strides)
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    index, first, rows, start_k, limits = common.load_query_block(
        seq_bounds, head_counts, seqlen_q, seqlen_k, window, BLOCK_Q
    )
    batch, head, _ = index
    stop_q = limits[0]
    if first >= stop_q:
        return
    q = common.load_tile((q_source, q_strides), batch, head, first, stop_q, BLOCK_Q, HEAD_DIM)
    g = common.load_tile((g_source, g_strides), batch, head, first, stop_q, BLOCK_Q, V_HEAD_DIM)
    offset = (common.to_int64(batch) * head_counts[0] + head) * seqlen_q
    lse = tl.load(lse_source + offset + rows, mask=rows < stop_q, other=float("inf"))  # [BLOCK_Q]
    delta = tl.zeros([BLOCK_Q], tl.float32)
    if ELEMENTWISE & FLAGS == 0:
        o = common.load_tile((output, o_strides), batch, head, first, stop_q, BLOCK_Q, V_HEAD_DIM)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # [BLOCK_Q]
    length = formulas.log2_length(rows, offset, limits, start_k, counts, FLAGS)  # [BLOCK_Q]
    s = formulas.load_s(head, s, FLAGS)
    plain_slope = formulas.load_slope(head, slopes, FLAGS)
    qk_scale = formulas.times_s_log_n(log2_scale, s * length, FLAGS)
    slope = formulas.times_s_log_n(plain_slope, s * length, FLAGS)
    score_mod = (formulas.column(qk_scale), inv_softcap, formulas.column(slope), None)
    unit = log2_scale
    if SCORE_MOD & FLAGS:
        unit = 1.0

    ranges = common.key_ranges(first, start_k, limits, mask, FLAGS, BLOCK_Q, BLOCK_K)
    if NEEDS_EXPM1 & FLAGS and g.dtype != tl.float32:
        small = lse < SMALL_LSE
        if tl.max(small.to(tl.int32)) > 0:
            exact = precise_delta(
                q, g, rows, ranges[0], ranges[3], k_tensor, v_tensor, mask, unit, score_mod,
                mask_strides, index, limits, NORM, FLAGS, FAST, BLOCK_Q, BLOCK_K, HEAD_DIM,
                V_HEAD_DIM,
            )  # fmt: skip
            delta = tl.where(small, exact, delta)
    if ELEMENTWISE & FLAGS == 0:
        tl.store(deltas + offset + rows, delta, mask=rows < stop_q)

    dq = tl.zeros([BLOCK_Q, common.block(HEAD_DIM)], tl.float32)
    dparam = tl.zeros([BLOCK_Q], tl.float32)
    dslopes = tl.zeros([BLOCK_Q], tl.float32)
    for part in tl.static_range(3):
        if (part == 0 and WINDOWED & FLAGS) or (part == 1 and mask is None) or part == 2:
            dq, dparam, dslopes = attn_bwd_dq_inner(
                dq, dparam, dslopes, q, g, lse, delta, rows, ranges[part], ranges[part + 1],
                k_tensor, v_tensor, mask, unit, score_mod, (log2_scale, plain_slope), mask_strides,
                index, limits, NORM, FLAGS, part != 1, FAST, BLOCK_K, HEAD_DIM, V_HEAD_DIM, STAGES,
            )  # fmt: skip
    if DPARAM & FLAGS:
        if SCALED & FLAGS:
            dparam = dparam * (length * (LN_2 * LN_2))
        tl.store(dparam_rows + offset + rows, dparam, mask=rows < stop_q)
    if DSINKS & FLAGS:
        of_sink = formulas.sink_gradient(formulas.load_sink(head, sinks, FLAGS), lse, delta)
        tl.store(dsinks_rows + offset + rows, of_sink, mask=rows < stop_q)
    if DSLOPES & FLAGS:
        dslopes = formulas.times_s_log_n(dslopes, s * length, FLAGS)
        tl.store(dslopes_rows + offset + rows, dslopes, mask=rows < stop_q)
    if SCALED & FLAGS:
        dq = dq * (formulas.column(qk_scale) / log2_scale)
    common.store_tile(
        (dq_out, dq_strides), formulas.cast_saturate(dq * scale, dq_out.dtype.element_ty), batch,
        head, first, stop_q, HEAD_DIM,
    )  # fmt: skip


@triton.jit
def attn_bwd_dkdv_inner(
    dk, dv, k, v, keys, begin, end, q_tensor, g_tensor, lse_row, delta_row, mask, counts,
    scale, score_mod, mask_strides, batch, head, limits,
    NORM: tl.constexpr, FLAGS: tl.constexpr, MASKED: tl.constexpr, PRECISE: tl.constexpr,
    FAST: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the queries from ``begin`` to ``end`` give to the gradients of a block of ``keys``:
    dk [BLOCK_K, HEAD_DIM] and dv [BLOCK_K, V_HEAD_DIM]; return both. dk still lacks the scores'
    scale, by which the caller multiplies it. ``scale``: that scale in log2 units. ``score_mod``:
    where the sequence's keys begin, the factor before the tanh, the slope, formulas.load_s, and
    where the head's values by row begin. ``limits``: of common.attn_mask; ``counts``: see
    formulas.log2_length. MASKED: the tiles need a mask; PRECISE: weights of softpick by the series
    for e^x − 1."""
    stop_q = limits[0]
    start_k, inv_softcap, slope, s, value_row = score_mod
    for start in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
        q = common.load_tile(q_tensor, batch, head, start, stop_q, BLOCK_Q, HEAD_DIM, MASKED)
        if MASKED:  # a row beyond the last has lse +∞, so all its weights are 0
            lse = tl.load(lse_row + rows, mask=rows < stop_q, other=float("inf"))  # [BLOCK_Q]
            delta = tl.load(delta_row + rows, mask=rows < stop_q, other=0.0)  # [BLOCK_Q]
        else:
            lse = tl.load(lse_row + rows)
            delta = tl.load(delta_row + rows)
        scores = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        g = common.load_tile(g_tensor, batch, head, start, stop_q, BLOCK_Q, V_HEAD_DIM, MASKED)
        dp = tl.dot(v, g.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        unit = scale
        tanhs = scores
        qk_scale = scale
        row_slope = slope
        if SCORE_MOD & FLAGS:
            unit = 1.0
            if SCALED & FLAGS:
                length = formulas.log2_length(rows, value_row, limits, start_k, counts, FLAGS)
                s_log_n = (s * length)[None, :]  # [1, BLOCK_Q]
                qk_scale = formulas.times_s_log_n(scale, s_log_n, FLAGS)
                row_slope = formulas.times_s_log_n(slope, s_log_n, FLAGS)
            ahead = keys[:, None] - (start + limits[2])
            scores, tanhs = formulas.scores_of(
                scores, ahead, tl.arange(0, BLOCK_Q)[None, :],
                (qk_scale, inv_softcap, row_slope, None), FLAGS, FAST,
            )  # fmt: skip
        y = scores * unit
        e = formulas.recompute_e(y - lse[None, :], scores, NORM, FAST, False)  # [BLOCK_K, BLOCK_Q]
        p = formulas.recompute_p(e, y, tl.math.exp2(-lse[None, :]), NORM, PRECISE)
        if MASKED:
            allowed = common.attn_mask(  # [BLOCK_K, BLOCK_Q]
                rows[None, :], keys[:, None], limits, mask, mask_strides, batch, head, FLAGS
            )
            e = tl.where(allowed, e, 0.0)
            p = tl.where(allowed, p, 0.0)
        # The tensor cores add to dv while the scores' gradients are computed.
        dv = tl.dot(formulas.cast_p(p, g.dtype, NORM, FAST), g, dv, input_precision="ieee")
        ds = formulas.score_gradient(
            e, scores, dp, delta[None, :], NORM, False
        )  # [BLOCK_K, BLOCK_Q]
        if CAPPED & FLAGS:
            ds = ds * formulas.cap_gradient(tanhs)
        if SCALED & FLAGS:
            ds = ds * (qk_scale / scale)
        dk = tl.dot(formulas.cast_saturate(ds, q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=VARYING)
def attn_bwd_dkdv(
    q_source, k_source, v_source, g_source, lse_source, deltas, needs_expm1, dk_out, dv_out,
    mask, seq_bounds, slopes, s, counts,
    head_counts, seqlen_q, seqlen_k, window, scale, log2_scale, inv_softcap, strides,
    mask_b, mask_h, mask_t, mask_k,
    NORM: tl.constexpr, FLAGS: tl.constexpr, PRECISE: tl.constexpr, FAST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of BLOCK_K keys and values, over all query heads that share
    them. ``head_counts``: key heads, and how many query heads share one. ``strides``: of q, k, v,
    dO, dk and dv. PRECISE: all weights of softpick by the series for e^x − 1, else where
    ``needs_expm1`` has a flag. Others as in :func:`attn_bwd_dq`, which wrote ``deltas``."""
    kv_heads, group = head_counts
    q_strides, k_strides, v_strides, g_strides, dk_strides, dv_strides = strides
    q_tensor, g_tensor = (q_source, q_strides), (g_source, g_strides)
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    kv_head = tl.program_id(1)
    batch, start_q, stop_q, start_k, stop_k, shift = common.load_sequence(
        seq_bounds, tl.program_id(2), seqlen_q, seqlen_k
    )
    first = start_k + tl.program_id(0) * BLOCK_K
    if first >= stop_k:
        return
    limits = (stop_q, stop_k, shift, window)
    keys = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    k = common.load_tile((k_source, k_strides), batch, kv_head, first, stop_k, BLOCK_K, HEAD_DIM)
    v = common.load_tile((v_source, v_strides), batch, kv_head, first, stop_k, BLOCK_K, V_HEAD_DIM)
    begin = start_q
    end = stop_q
    if CAUSAL & FLAGS:
        begin = tl.maximum(begin, first - shift)
    whole_begin = begin
    if CAUSAL & FLAGS:
        partly = tl.maximum(0, first + BLOCK_K - 1 - shift - begin)
        whole_begin += tl.cdiv(partly, BLOCK_Q) * BLOCK_Q
    whole_end = end
    if WINDOWED & FLAGS:
        end = tl.minimum(end, first + BLOCK_K - 1 - shift + window)
        whole_end = tl.minimum(end, first - shift + window)
    whole_end = whole_begin + tl.maximum(0, whole_end - whole_begin) // BLOCK_Q * BLOCK_Q
    if mask is not None:
        whole_begin = begin
        whole_end = begin
    # The queries in three ranges, as the keys in common.key_ranges.
    starts = (begin, whole_begin, whole_end)
    stops = (tl.minimum(whole_begin, end), whole_end, end)

    # Where the forward pass met rows of tiny scores, weights need the series for e^x − 1.
    if NEEDS_EXPM1 & FLAGS and not PRECISE:
        chunk = first // CHUNK + tl.arange(0, MAX_CHUNKS)
        here = chunk <= (tl.minimum(first + BLOCK_K, stop_k) - 1) // CHUNK
        flags = needs_expm1 + (common.to_int64(batch) * kv_heads + kv_head) * tl.cdiv(
            seqlen_k, CHUNK
        )
        tl.static_assert(BLOCK_K <= (MAX_CHUNKS - 1) * CHUNK)
        precise = tl.max(tl.load(flags + chunk, mask=here, other=0)) != 0
    else:
        precise = PRECISE
    dk = tl.zeros([BLOCK_K, common.block(HEAD_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_K, common.block(V_HEAD_DIM)], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        offset = (common.to_int64(batch) * kv_heads * group + head) * seqlen_q
        slope = formulas.load_slope(head, slopes, FLAGS)
        score_mod = (start_k, inv_softcap, slope, formulas.load_s(head, s, FLAGS), offset)
        if precise:
            dk, dv = attn_bwd_dkdv_inner(
                dk, dv, k, v, keys, begin, end, q_tensor, g_tensor, lse_source + offset,
                deltas + offset, mask, counts, log2_scale, score_mod, mask_strides, batch, head,
                limits, NORM, FLAGS, True, True, FAST, BLOCK_Q, HEAD_DIM, V_HEAD_DIM, 1,
            )  # fmt: skip
        else:
            for part in tl.static_range(3):
                if part == 2 or (mask is None and (part == 1 or CAUSAL & FLAGS)):
                    dk, dv = attn_bwd_dkdv_inner(
                        dk, dv, k, v, keys, starts[part], stops[part], q_tensor, g_tensor,
                        lse_source + offset, deltas + offset, mask, counts, log2_scale, score_mod,
                        mask_strides, batch, head, limits, NORM, FLAGS, part != 1, False, FAST,
                        BLOCK_Q, HEAD_DIM, V_HEAD_DIM, STAGES,
                    )  # fmt: skip

    common.store_tile(
        (dk_out, dk_strides), formulas.cast_saturate(dk * scale, dk_out.dtype.element_ty), batch,
        kv_head, first, stop_k, HEAD_DIM,
    )  # fmt: skip
    common.store_tile(
        (dv_out, dv_strides), formulas.cast_saturate(dv, dv_out.dtype.element_ty), batch, kv_head,
        first, stop_k, V_HEAD_DIM,
    )  # fmt: skip
