"""The forward pass: one program per block of queries, over the keys in tiles.

NO_MAX leaves out the running maximum. In bf16, whose exponent is float32's, e^x neither overflows
nor loses bits for scores of any trained model, so the sums need no rescaling and a softpick score
costs half the instructions. Afterwards each block checks its sums; one that left the safe range is
computed again with the running maximum. ε then stands beside Σ |e^x − 1| without e^−m, which
changes the denominator by at most 1e-6 of itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels import common, formulas
from qbench.attention.kernels.common import (
    ELEMENTWISE,
    NEEDS_EXPM1,
    SCORE_MOD_OR_BIAS,
    VARYING,
    WINDOWED,
)
from qbench.attention.kernels.formulas import CHUNK, SMALL_MAX


@triton.jit
def attn_fwd_inner(
    acc, l_i, m_i, tiny, flags, q, rows, begin, end, k_tensor, v_tensor, mask, scale, score_mod,
    mask_strides, index, limits,
    NORM: tl.constexpr, FLAGS: tl.constexpr, MASKED: tl.constexpr, NO_MAX: tl.constexpr,
    PRECISE: tl.constexpr, FAST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``begin`` to ``end`` to the running output acc [BLOCK_Q, V_HEAD_DIM], sum
    and maximum [BLOCK_Q], which are [BLOCK_Q, 8] with NO_MAX. ``index``: batch row, query head and
    key head. ``limits``: see ``common.attn_mask``. ``score_mod``: what formulas.scores_of takes
    after the positions; ``scale`` is 1 if it has been applied. ``flags``: one per CHUNK of keys,
    set if a row that is ``tiny`` has a positive score there; both may be None."""
    batch, head, kv_head = index
    stop_k = limits[1]
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = common.load_tile(k_tensor, batch, kv_head, start, stop_k, BLOCK_K, HEAD_DIM, MASKED)
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        if SCORE_MOD_OR_BIAS & FLAGS:
            # From the tile's first key: what slopes take from keys is the same in all tiles.
            q_pos = rows[:, None] + (limits[2] - start)
            scores = formulas.scores_of(
                scores, tl.arange(0, BLOCK_K)[None, :], q_pos, score_mod, FLAGS, FAST
            )[0]
        if MASKED:
            allowed = common.attn_mask(  # [BLOCK_Q, BLOCK_K]
                rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head, FLAGS
            )
            scores = tl.where(allowed, scores, formulas.masked_score(NORM))
        if tiny is not None:  # noqa: SIM102 (one is known at compile time)
            if tl.max((tiny[:, None] & (scores > 0)).to(tl.int32)) > 0:
                last = tl.minimum(start + BLOCK_K, stop_k) - 1
                for i in tl.static_range((BLOCK_K - 1) // CHUNK + 2):  # a tile may begin inside
                    tl.store(flags + tl.minimum(start + i * CHUNK, last) // CHUNK, 1)
        if NO_MAX:
            # Eight sums per row, so that no thread needs another's until the end.
            p, below = formulas.forward_terms(
                scores * scale, 0.0, NORM, False
            )  # [BLOCK_Q, BLOCK_K] each
            l_i += tl.sum(tl.reshape(below, [BLOCK_Q, BLOCK_K // 8, 8]), 1)  # [BLOCK_Q, 8]
            if NEEDS_EXPM1 & FLAGS:  # for the check at the end
                highest = tl.max(tl.reshape(scores, [BLOCK_Q, BLOCK_K // 8, 8]), 1)
                m_i = tl.maximum(m_i, highest)  # [BLOCK_Q, 8]
        else:
            p, acc, l_i, m_i = formulas.online_softmax(
                acc, l_i, m_i, scores, scale, NORM, PRECISE, FAST, FAST and not MASKED
            )
        v = common.load_tile(v_tensor, batch, kv_head, start, stop_k, BLOCK_K, V_HEAD_DIM, MASKED)
        p = formulas.cast_p(p, v.dtype, NORM, FAST)  # [BLOCK_Q, BLOCK_K]
        acc = tl.dot(p, v, acc, input_precision="ieee")
    return acc, l_i, m_i


@triton.jit(do_not_specialize=VARYING)
def attn_fwd(
    q_source, k_source, v_source, output, lse_out, needs_expm1, mask, seq_bounds,
    sinks, bias, slopes, s, counts,
    head_counts, seqlen_q, seqlen_k, window, scale, inv_softcap, strides,
    mask_b, mask_h, mask_t, mask_k,
    NORM: tl.constexpr, FLAGS: tl.constexpr, NO_MAX: tl.constexpr, PRECISE: tl.constexpr,
    FAST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute output and lse of one block of BLOCK_Q queries of one head per program; ``lse_out``
    is [B, heads, seqlen_q]. NO_MAX: see the top of this module; PRECISE: terms by expm1 in all
    tiles; FAST: bf16 on a GPU, with inline PTX; STAGES: tiles of keys that are loaded ahead.
    ``head_counts``: query heads, query heads per key head. ``strides``: of batch row, head and row,
    of q, k, v and output each. The mask's strides are separate arguments: inside a tuple Triton
    would compile for their values. ``needs_expm1`` [B, key heads, chunks of keys], all 0 before:
    the flags that :func:`attn_fwd_inner` sets. ``sinks``, ``bias``, ``slopes``, ``s`` [heads],
    ``counts`` [B, heads, seqlen_q]: see :mod:`qbench.attention.kernels.formulas`; ``scale``,
    ``inv_softcap``: see ``ops.scales``."""
    q_strides, k_strides, v_strides, o_strides = strides
    k_tensor, v_tensor = (k_source, k_strides), (v_source, v_strides)
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    index, first, rows, start_k, limits = common.load_query_block(
        seq_bounds, head_counts, seqlen_q, seqlen_k, window, BLOCK_Q
    )
    batch, head, kv_head = index
    stop_q = limits[0]
    if first >= stop_q:
        return
    q = common.load_tile((q_source, q_strides), batch, head, first, stop_q, BLOCK_Q, HEAD_DIM)
    ranges = common.key_ranges(first, start_k, limits, mask, FLAGS, BLOCK_Q, BLOCK_K)

    value_row = (common.to_int64(batch) * head_counts[0] + head) * seqlen_q
    qk_scale, slope, minus_bias, unit = formulas.row_score_mod(
        head, rows, value_row, limits, start_k, counts, scale, bias, slopes, s, FLAGS
    )
    score_mod = (qk_scale, inv_softcap, slope, minus_bias[:, None] if ELEMENTWISE & FLAGS else None)

    acc = tl.zeros([BLOCK_Q, common.block(V_HEAD_DIM)], tl.float32)
    if NO_MAX:
        l_i = tl.zeros([BLOCK_Q, 8], tl.float32)
        m_i = tl.zeros([BLOCK_Q, 8], tl.float32)
    else:
        l_i = tl.zeros([BLOCK_Q], tl.float32)
        m_i = tl.full([BLOCK_Q], formulas.initial_max(NORM), tl.float32)
    for part in tl.static_range(3):
        if (part == 0 and WINDOWED & FLAGS) or (part == 1 and mask is None) or part == 2:
            acc, l_i, m_i = attn_fwd_inner(
                acc, l_i, m_i, None, None, q, rows, ranges[part], ranges[part + 1], k_tensor,
                v_tensor, mask, unit, score_mod, mask_strides, index, limits, NORM, FLAGS,
                part != 1, NO_MAX, PRECISE, FAST, BLOCK_Q, BLOCK_K, HEAD_DIM, V_HEAD_DIM, STAGES,
            )  # fmt: skip

    if NO_MAX:
        l_i = tl.sum(l_i, 1)  # [BLOCK_Q]
        m_i = tl.max(m_i, 1) * unit  # [BLOCK_Q]
    if ELEMENTWISE & FLAGS:
        m_i = minus_bias
    elif NO_MAX or (NEEDS_EXPM1 & FLAGS and not PRECISE):
        again = tl.zeros([BLOCK_Q], tl.int1)
        tiny = None
        flags = None
        if NEEDS_EXPM1 & FLAGS:
            again = (m_i > 0) & (m_i < SMALL_MAX)
            tiny = again & (rows < stop_q)
            kv_heads = head_counts[0] // head_counts[1]
            flags = needs_expm1 + (common.to_int64(batch) * kv_heads + kv_head) * tl.cdiv(
                seqlen_k, CHUNK
            )
        if NO_MAX:
            again = again | formulas.sum_lost_bits(l_i, NORM)
        if tl.max((again & (rows < stop_q)).to(tl.int32)) > 0:
            acc, l_i, m_i = attn_fwd_inner(
                tl.zeros([BLOCK_Q, common.block(V_HEAD_DIM)], tl.float32),
                tl.zeros([BLOCK_Q], tl.float32),
                tl.full([BLOCK_Q], formulas.initial_max(NORM), tl.float32), tiny, flags, q, rows,
                ranges[0], ranges[3], k_tensor, v_tensor, mask, unit, score_mod, mask_strides,
                index, limits, NORM, FLAGS, True, False, True, FAST, BLOCK_Q, BLOCK_K, HEAD_DIM,
                V_HEAD_DIM, 1,
            )  # fmt: skip
        elif NO_MAX:
            m_i = tl.zeros([BLOCK_Q], tl.float32)
    sink = formulas.load_sink(head, sinks, FLAGS)
    out, lse = formulas.finalize(
        acc, l_i, m_i, sink, NORM, FLAGS
    )  # [BLOCK_Q, V_HEAD_DIM], [BLOCK_Q]
    common.store_tile((output, o_strides), out, batch, head, first, stop_q, V_HEAD_DIM)
    tl.store(lse_out + value_row + rows, lse, mask=rows < stop_q)
