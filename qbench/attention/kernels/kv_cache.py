"""Forward pass over a quantized KV cache: each query reads every key and value either as it was
written or as it is read back, see :mod:`qbench.attention.kv_cache`.

One program a block of queries, over the keys in tiles. A tile that all rows read from one source
costs what it does in the plain forward pass; only those where sources meet, at most a few a block,
are computed from both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels import common, formulas
from qbench.attention.kernels.common import ELEMENTWISE, SHAPED, VARYING

FAR = tl.constexpr(2**30)


@triton.jit
def bound(position, first, recent, group):
    """The first position that a query at ``position`` reads unquantized."""
    return first + tl.maximum(position + 1 - recent - first, 0) // group * group


@triton.jit(
    do_not_specialize=[*VARYING, "keep_first", "keep_recent", "key_group", "position_stride"]
)
def quantized_kv_fwd(
    q_source, k_source, v_source, qk_source, qv_source, output, positions, mask, spans,
    sinks, bias, slopes, s, counts,
    head_counts, seqlen_q, seqlen_k, window, keep_first, keep_recent, key_group,
    scale, inv_softcap, strides, position_stride, mask_b, mask_h, mask_t, mask_k,
    NORM: tl.constexpr, FLAGS: tl.constexpr, SKIP: tl.constexpr, FAST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One program a block of BLOCK_Q queries and a head. ``positions`` [B or 1, Tk] int32;
    ``strides``: of batch row, head and row, of q, k, v, quantized k, quantized v and output each;
    others as in ``forward.attn_fwd``."""
    q_strides, k_strides, v_strides, qk_strides, qv_strides, o_strides = strides
    k_tensor, v_tensor = (k_source, k_strides), (v_source, v_strides)
    qk_tensor, qv_tensor = (qk_source, qk_strides), (qv_source, qv_strides)
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    index, first, rows, start_k, limits = common.load_query_block(
        spans, head_counts, seqlen_q, seqlen_k, window, BLOCK_Q
    )
    batch, head, kv_head = index
    stop_q, stop_k, shift, _ = limits
    if first >= stop_q:
        return
    q = common.load_tile((q_source, q_strides), batch, head, first, stop_q, BLOCK_Q, HEAD_DIM)
    place = positions + common.to_int64(batch) * position_stride
    real = rows < stop_q
    own = tl.load(place + rows + shift, mask=real, other=0)  # [BLOCK_Q]
    key_bound = bound(own, keep_first, keep_recent, key_group)
    value_bound = bound(own, keep_first, keep_recent, 1)
    most_keys = tl.max(tl.where(real, key_bound, -FAR))
    most_values = tl.max(tl.where(real, value_bound, -FAR))
    least_keys = tl.min(tl.where(real, key_bound, FAR))
    least_values = tl.min(tl.where(real, value_bound, FAR))

    ranges = common.key_ranges(first, start_k, limits, mask, FLAGS, BLOCK_Q, BLOCK_K)
    value_row = (common.to_int64(batch) * head_counts[0] + head) * seqlen_q
    qk_scale, slope, minus_bias, unit = formulas.row_shaping(
        head, rows, value_row, limits, start_k, counts, scale, bias, slopes, s, FLAGS
    )
    shaping = (qk_scale, inv_softcap, slope, minus_bias[:, None] if ELEMENTWISE & FLAGS else None)
    acc = tl.zeros([BLOCK_Q, common.block(V_HEAD_DIM)], tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    m_i = tl.full([BLOCK_Q], formulas.initial_max(NORM), tl.float32)
    for start in range(ranges[0], ranges[3], BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        at = tl.load(place + keys, mask=keys < stop_k, other=FAR)  # [BLOCK_K]
        nearest = tl.min(at)
        farthest = tl.max(tl.where(keys < stop_k, at, -FAR))
        written = at >= keep_first
        # where nothing of a tile is read from a source, that source is not read at all
        from_plain_k = (nearest < keep_first) | (farthest >= least_keys)
        from_plain_v = (nearest < keep_first) | (farthest >= least_values)
        from_quantized_k = (farthest >= keep_first) & (nearest < most_keys)
        from_quantized_v = (farthest >= keep_first) & (nearest < most_values)

        scores = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        if from_plain_k:
            k = common.load_tile(k_tensor, batch, kv_head, start, stop_k, BLOCK_K, HEAD_DIM)
            scores = tl.dot(q, k.T, input_precision="ieee")
        if from_quantized_k:
            k = common.load_tile(qk_tensor, batch, kv_head, start, stop_k, BLOCK_K, HEAD_DIM)
            quantized = tl.dot(q, k.T, input_precision="ieee")
            scores = tl.where(
                written[None, :] & (at[None, :] < key_bound[:, None]), quantized, scores
            )
        if SHAPED & FLAGS:
            origin = first + shift
            scores = formulas.scores_of(
                scores, keys[None, :] - origin, rows[:, None] + shift - origin, shaping, FLAGS,
                FAST,
            )[0]  # fmt: skip
        allowed = common.attn_mask(  # [BLOCK_Q, BLOCK_K]
            rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head, FLAGS
        )
        scores = tl.where(allowed, scores, formulas.masked_score(NORM))
        p, acc, l_i, m_i = formulas.online_softmax(
            acc, l_i, m_i, scores, unit, NORM, True, FAST, False
        )
        if SKIP:
            some = tl.max(p) > 0
            from_plain_v = from_plain_v & some
            from_quantized_v = from_quantized_v & some
        weights = formulas.cast_p(p, v_source.dtype.element_ty, NORM, FAST)  # [BLOCK_Q, BLOCK_K]
        none = tl.zeros([BLOCK_Q, BLOCK_K], weights.dtype)
        of_value = written[None, :] & (at[None, :] < value_bound[:, None])
        if from_plain_v:
            v = common.load_tile(v_tensor, batch, kv_head, start, stop_k, BLOCK_K, V_HEAD_DIM)
            acc = tl.dot(tl.where(of_value, none, weights), v, acc, input_precision="ieee")
        if from_quantized_v:
            v = common.load_tile(qv_tensor, batch, kv_head, start, stop_k, BLOCK_K, V_HEAD_DIM)
            acc = tl.dot(tl.where(of_value, weights, none), v, acc, input_precision="ieee")

    sink = formulas.load_sink(head, sinks, FLAGS)
    out, _ = formulas.finalize(acc, l_i, m_i, sink, NORM, FLAGS)  # [BLOCK_Q, V_HEAD_DIM]
    common.store_tile((output, o_strides), out, batch, head, first, stop_q, V_HEAD_DIM)
