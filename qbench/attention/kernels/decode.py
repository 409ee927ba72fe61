"""Decode: few queries over many keys, so the keys are split among programs and joined after.

Reading keys and values is all the time there is. A key whose weight is 0 for every query of its
tile adds nothing, so its value row is not even read: softpick and rectified attention pay for
the values that they use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels import common, formulas
from qbench.attention.kernels.common import ELEMENTWISE, SCORE_MOD_OR_BIAS, VARYING


@triton.jit
def group_rows(start_q, stop_q, kv_head, group, BLOCK_R: tl.constexpr):
    """Return, for BLOCK_R rows of a group's heads × queries: which are real, their query rows, and
    their heads (for one that is not real, a head that exists)."""
    count = tl.maximum(stop_q - start_q, 1)
    index = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    real = index < group * (stop_q - start_q)
    return real, start_q + index % count, kv_head * group + tl.where(real, index // count, 0)


@triton.jit(do_not_specialize=[*VARYING, "splits"])
def attn_decode(
    q_source, k_source, v_source, partial, mask, seq_bounds, bias, slopes, s, counts,
    head_counts, seqlen_q, seqlen_k, window, scale, inv_softcap, splits, strides,
    mask_b, mask_h, mask_t, mask_k,
    NORM: tl.constexpr, FLAGS: tl.constexpr, SKIP: tl.constexpr, FAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a partial output per sequence, key head and split, one program each; its BLOCK_R rows
    are the group's heads × queries. The result goes to ``partial`` [sequences · kv_heads, splits,
    BLOCK_R, BLOCK_DV + 2]: of each row the output before the division, its sum and its maximum.
    SKIP: do not read value rows whose weights are all 0. ``head_counts``: key heads, and how many
    query heads share one. ``strides``: of batch row, head and row, of q, k and v each; others as in
    :func:`qbench.attention.kernels.forward.attn_fwd`."""
    kv_heads, group = head_counts
    q_strides, k_strides, v_strides = strides
    k_tensor = (k_source, k_strides)
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    pair = common.to_int64(tl.program_id(2)) * kv_heads + kv_head
    batch, start_q, stop_q, start_k, stop_k, shift = common.load_sequence(
        seq_bounds, tl.program_id(2), seqlen_q, seqlen_k
    )
    real, rows, heads = group_rows(start_q, stop_q, kv_head, group, BLOCK_R)  # [BLOCK_R] each
    columns = tl.arange(0, common.block(HEAD_DIM))  # [HEAD_DIM]
    q_pointers = common.head_of(q_source, batch, heads, q_strides)
    q_pointers += common.to_int64(rows) * q_strides[2]
    q = tl.load(  # [BLOCK_R, HEAD_DIM]
        q_pointers[:, None] + columns[None, :],
        mask=real[:, None] & (columns[None, :] < HEAD_DIM),
        other=0.0,
    )

    row_limits = (stop_q, stop_k, shift, window)
    ranges = common.key_ranges(start_q, start_k, row_limits, None, FLAGS, BLOCK_R, BLOCK_K)
    begin = ranges[0]
    end = ranges[3]
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_K), splits) * BLOCK_K
    begin += split * share
    end = tl.minimum(end, begin + share)
    limits = (stop_q, end, shift, window)

    value_row = (common.to_int64(batch) * kv_heads * group + heads) * seqlen_q  # [BLOCK_R]
    qk_scale, slope, minus_bias, unit = formulas.row_score_mod(
        heads, rows, value_row, row_limits, start_k, counts, scale, bias, slopes, s, FLAGS
    )
    score_mod = (qk_scale, inv_softcap, slope, minus_bias[:, None] if ELEMENTWISE & FLAGS else None)

    acc = tl.zeros([BLOCK_R, common.block(V_HEAD_DIM)], tl.float32)
    l_i = tl.zeros([BLOCK_R], tl.float32)
    m_i = tl.full([BLOCK_R], formulas.initial_max(NORM), tl.float32)
    if ELEMENTWISE & FLAGS:
        m_i = minus_bias
    BLOCK_DV: tl.constexpr = common.block(V_HEAD_DIM)
    v_columns = tl.arange(0, BLOCK_DV)  # [V_HEAD_DIM]
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = common.load_tile(k_tensor, batch, kv_head, start, end, BLOCK_K, HEAD_DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_R, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        allowed = real[:, None] & common.attn_mask(  # [BLOCK_R, BLOCK_K]
            rows[:, None], keys[None, :], limits, mask, mask_strides, batch, heads[:, None], FLAGS
        )
        if SCORE_MOD_OR_BIAS & FLAGS:
            last = stop_q - 1 + shift  # positions count from it
            scores = formulas.scores_of(
                scores, keys[None, :] - last, rows[:, None] + shift - last, score_mod, FLAGS, FAST
            )[0]
        scores = tl.where(allowed, scores, formulas.masked_score(NORM))
        p, acc, l_i, m_i = formulas.online_softmax(
            acc, l_i, m_i, scores, unit, NORM, True, FAST, False
        )
        read_value = keys < end  # [BLOCK_K]
        if SKIP:
            read_value = read_value & (tl.max(p, 0) > 0)
        v_pointers = common.head_of(v_source, batch, kv_head, v_strides)
        v_pointers += common.to_int64(start) * v_strides[2]
        v = tl.load(  # [BLOCK_K, V_HEAD_DIM]
            v_pointers + tl.arange(0, BLOCK_K)[:, None] * v_strides[2] + v_columns[None, :],
            mask=read_value[:, None] & (v_columns[None, :] < V_HEAD_DIM),
            other=0.0,
        )
        acc = tl.dot(formulas.cast_p(p, v.dtype, NORM, FAST), v, acc, input_precision="ieee")

    at = (pair * splits + split) * BLOCK_R + tl.arange(0, BLOCK_R)
    pointers = partial + at * (BLOCK_DV + 2)  # [BLOCK_R]
    tl.store(pointers[:, None] + v_columns[None, :], acc)
    tl.store(pointers + BLOCK_DV, l_i)
    tl.store(pointers + BLOCK_DV + 1, m_i)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "splits"])
def combine(
    output, lse_out, partial, seq_bounds, sinks, head_counts, seqlen_q, seqlen_k, splits, o_strides,
    NORM: tl.constexpr, FLAGS: tl.constexpr, BLOCK_R: tl.constexpr, V_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Join the splits of one sequence and key head, always in the same order, into ``output`` and
    ``lse_out``. ``partial``: as :func:`attn_decode` wrote it; other arguments as there."""
    kv_heads, group = head_counts
    kv_head = tl.program_id(0) % kv_heads
    batch, start_q, stop_q, _, _, _ = common.load_sequence(
        seq_bounds, tl.program_id(0) // kv_heads, seqlen_q, seqlen_k
    )
    real, rows, heads = group_rows(start_q, stop_q, kv_head, group, BLOCK_R)  # [BLOCK_R] each
    BLOCK_DV: tl.constexpr = common.block(V_HEAD_DIM)
    columns = tl.arange(0, BLOCK_DV)  # [V_HEAD_DIM]
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    l_i = tl.zeros([BLOCK_R], tl.float32)
    m_i = tl.full([BLOCK_R], formulas.initial_max(NORM), tl.float32)
    for split in range(splits):
        at = (common.to_int64(tl.program_id(0)) * splits + split) * BLOCK_R + tl.arange(0, BLOCK_R)
        pointers = partial + at * (BLOCK_DV + 2)  # [BLOCK_R]
        their_m = tl.load(pointers + BLOCK_DV + 1)  # [BLOCK_R]
        m_ij = tl.maximum(m_i, their_m)  # of sigmoid the same in all splits
        shift_m = formulas.finite_max(m_ij, NORM)
        ours = tl.math.exp2(m_i - shift_m)
        theirs = tl.math.exp2(their_m - shift_m)
        acc = acc * ours[:, None]
        acc += tl.load(pointers[:, None] + columns[None, :]) * theirs[:, None]
        l_i = l_i * ours + tl.load(pointers + BLOCK_DV) * theirs
        m_i = m_ij
    out, lse = formulas.finalize(
        acc, l_i, m_i, formulas.load_sink(heads, sinks, FLAGS), NORM, FLAGS
    )
    pointers = common.head_of(output, batch, heads, o_strides)
    pointers += common.to_int64(rows) * o_strides[2]
    inside = real[:, None] & (columns[None, :] < V_HEAD_DIM)
    tl.store(pointers[:, None] + columns[None, :], out.to(output.dtype.element_ty), mask=inside)
    lse_row = lse_out + (common.to_int64(batch) * kv_heads * group + heads) * seqlen_q
    tl.store(lse_row + rows, lse, mask=real)
