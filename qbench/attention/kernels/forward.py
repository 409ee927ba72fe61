"""Forward pass: one program a block of queries, over the keys in tiles.

The keys of a block fall into three ranges: tiles that some row may see only in part (left of a
sliding window), tiles that every row sees whole, and tiles cut by causality or the end of the
sequence. Only the first and last need masks, and only they pay for them.

FREE leaves out the running maximum: in bf16, whose exponent is float32's, e^x itself neither
overflows nor loses bits for scores of any trained model, so the sums need no rescaling and a
softpick score costs half the instructions. Afterwards each block checks its sums; one that did
leave the safe range is computed again with the running maximum. ε then stands beside Σ |e^x − 1|
instead of its e^−m-fold, which changes the denominator by at most 1e-6 of itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import (
    SMALL_MAXIMUM,
    finish,
    finite_shift,
    first_maximum,
    load_rows,
    lost_bits,
    masked_score,
    rounded,
    sequence,
    terms,
    visible,
    wide,
)


@triton.jit
def sweep(
    acc, total, maximum, q, rows, begin, end,
    k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window, scale,
    k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    MASKED: tl.constexpr, FREE: tl.constexpr, NEAR_ZERO: tl.constexpr, PRECISE: tl.constexpr,
    SKIP: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, DV: tl.constexpr,
    DV_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes the keys from ``begin`` to ``end`` into the running output, sum and maximum."""
    for start in tl.range(begin, end, N, num_stages=STAGES):
        k = load_rows(
            k_source, batch, kv_head, start, stop_k, k_b, k_h, k_t, N, D, D_BLOCK, MASKED, TMA
        )
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MASKED:
            keys = start + tl.arange(0, N)
            seen = visible(
                rows[:, None], keys[None, :], stop_q, stop_k, shift, window,
                mask, batch, head, mask_b, mask_h, mask_t, mask_k, CAUSAL, WINDOW, HAS_MASK,
            )  # fmt: skip
            scores = tl.where(seen, scores, masked_score(NORMALIZER))
        if FREE:
            # Eight sums a row, so that no thread needs another's until the end.
            above, below = terms(scores * scale, 0.0, NORMALIZER, False)
            total += tl.sum(tl.reshape(below, [M, N // 8, 8]), 1)
            if NEAR_ZERO:  # for the check at the end
                maximum = tl.maximum(maximum, tl.max(tl.reshape(scores, [M, N // 8, 8]), 1))
        else:
            raised = tl.maximum(maximum, tl.max(scores, 1) * scale)
            shift_2 = finite_shift(raised, NORMALIZER)
            above, below = terms(scores * scale, shift_2[:, None], NORMALIZER, PRECISE)
            lower = tl.math.exp2(maximum - shift_2)
            total = total * lower + tl.sum(below, 1)
            acc = acc * lower[:, None]
            maximum = raised
        if SKIP:
            if tl.max(scores) > 0:
                v = load_rows(
                    v_source, batch, kv_head, start, stop_k, v_b, v_h, v_t, N, DV, DV_BLOCK,
                    MASKED, TMA,
                )  # fmt: skip
                acc = tl.dot(
                    rounded(above, v.dtype, NORMALIZER, FUSED), v, acc, input_precision="ieee"
                )
        else:
            v = load_rows(
                v_source, batch, kv_head, start, stop_k, v_b, v_h, v_t, N, DV, DV_BLOCK,
                MASKED, TMA,
            )  # fmt: skip
            acc = tl.dot(rounded(above, v.dtype, NORMALIZER, FUSED), v, acc, input_precision="ieee")
    return acc, total, maximum


@triton.jit(do_not_specialize=["queries", "keys", "window", "mask_b", "mask_h", "mask_t"])
def forward_kernel(
    q_source, k_source, v_source, output, lse_out, imprecise, mask, spans,
    heads, group, queries, keys, window, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    SPANS: tl.constexpr, FREE: tl.constexpr, NEAR_ZERO: tl.constexpr, PRECISE: tl.constexpr,
    SKIP: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr,
    EPSILON: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    D_BLOCK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Causal blocks at the end have the most keys: they start first, so that none starts late.
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

    acc = tl.zeros([M, DV_BLOCK], tl.float32)
    if FREE:
        total = tl.zeros([M, 8], tl.float32)
        maximum = tl.zeros([M, 8], tl.float32)
    else:
        total = tl.zeros([M], tl.float32)
        maximum = tl.full([M], first_maximum(NORMALIZER), tl.float32)
    if WINDOW:
        acc, total, maximum = sweep(
            acc, total, maximum, q, rows, begin, whole_begin,
            k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window, scale,
            k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
            NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, FREE, NEAR_ZERO, PRECISE, SKIP, TMA, FUSED,
            M, N, D, D_BLOCK, DV, DV_BLOCK, STAGES,
        )  # fmt: skip
    if not HAS_MASK:
        acc, total, maximum = sweep(
            acc, total, maximum, q, rows, whole_begin, whole_end,
            k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window, scale,
            k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
            NORMALIZER, CAUSAL, WINDOW, HAS_MASK, False, FREE, NEAR_ZERO, PRECISE, SKIP, TMA, FUSED,
            M, N, D, D_BLOCK, DV, DV_BLOCK, STAGES,
        )  # fmt: skip
    acc, total, maximum = sweep(
        acc, total, maximum, q, rows, whole_end, end,
        k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window, scale,
        k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
        NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, FREE, NEAR_ZERO, PRECISE, SKIP, TMA, FUSED,
        M, N, D, D_BLOCK, DV, DV_BLOCK, STAGES,
    )  # fmt: skip

    if FREE:
        total = tl.sum(total, 1)
        maximum = tl.max(maximum, 1) * scale
    if FREE or (NEAR_ZERO and not PRECISE):
        again = tl.zeros([M], tl.int1)
        if NEAR_ZERO:
            again = (maximum > 0) & (maximum < SMALL_MAXIMUM)
        tiny = tl.max((again & (rows < stop_q)).to(tl.int32)) > 0
        if FREE:
            again = again | lost_bits(total, NORMALIZER)
        if tl.max((again & (rows < stop_q)).to(tl.int32)) > 0:
            if tiny:
                tl.store(imprecise, 1)  # every program that stores, stores the same
            acc, total, maximum = sweep(
                tl.zeros([M, DV_BLOCK], tl.float32), tl.zeros([M], tl.float32),
                tl.full([M], first_maximum(NORMALIZER), tl.float32), q, rows, begin, end,
                k_source, v_source, mask, batch, head, kv_head, stop_q, stop_k, shift, window,
                scale, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_t, mask_k,
                NORMALIZER, CAUSAL, WINDOW, HAS_MASK, True, False, NEAR_ZERO, True, False, TMA,
                FUSED, M, N, D, D_BLOCK, DV, DV_BLOCK, 1,
            )  # fmt: skip

        elif FREE:
            maximum = tl.zeros([M], tl.float32)
    out, lse = finish(acc, total, maximum, EPSILON, NORMALIZER)
    columns = tl.arange(0, DV_BLOCK)
    pointers = output + wide(batch) * o_b + wide(head) * o_h
    pointers += wide(first) * o_t
    inside = (rows[:, None] < stop_q) & (columns[None, :] < DV)
    tl.store(
        pointers + tl.arange(0, M)[:, None] * o_t + columns[None, :],
        out.to(output.dtype.element_ty),
        mask=inside,
    )
    lse_row = lse_out + (wide(batch) * heads + head) * queries
    tl.store(lse_row + rows, lse, mask=rows < stop_q)
