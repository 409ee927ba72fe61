"""Decode: few queries over many keys, so the keys are split among programs and joined after.

Reading keys and values is all the time there is. A key whose weight is 0 for every query of its
tile adds nothing, so its value row is not even read: softpick and rectified attention pay for
the values that they use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import (
    finish,
    finite_shift,
    first_maximum,
    load_rows,
    masked_score,
    rounded,
    sequence,
    terms,
    visible,
    wide,
)


@triton.jit(do_not_specialize=["queries", "keys", "window", "splits", "mask_b", "mask_h", "mask_t"])
def decode_kernel(
    q_source, k_source, v_source, output, lse_out, partial, mask, spans,
    kv_heads, group, queries, keys, window, scale, splits,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, mask_b, mask_h, mask_t, mask_k,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    SPANS: tl.constexpr, SKIP: tl.constexpr, FUSED: tl.constexpr, SPLIT: tl.constexpr,
    EPSILON: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a sequence, key head and split; its R rows are the group's heads × queries.
    ``partial`` [sequences · kv_heads, splits, R, DV_BLOCK + 2] takes what a split gives."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1) % kv_heads
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // kv_heads, queries, keys, SPANS
    )
    count = tl.maximum(stop_q - start_q, 1)
    index = tl.arange(0, R)
    real = index < group * (stop_q - start_q)
    rows = start_q + index % count
    heads = kv_head * group + index // count
    columns = tl.arange(0, D_BLOCK)
    q_pointers = q_source + wide(batch) * q_b + wide(heads) * q_h + rows * q_t
    q = tl.load(
        q_pointers[:, None] + columns[None, :],
        mask=real[:, None] & (columns[None, :] < D),
        other=0.0,
    )

    begin = start_k
    end = stop_k
    if CAUSAL:
        end = tl.minimum(stop_k, stop_q + shift)
    if WINDOW:
        begin = tl.maximum(begin, start_q + shift - window + 1)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), N), splits) * N
    begin += split * share
    end = tl.minimum(end, begin + share)

    acc = tl.zeros([R, DV_BLOCK], tl.float32)
    total = tl.zeros([R], tl.float32)
    maximum = tl.full([R], first_maximum(NORMALIZER), tl.float32)
    v_columns = tl.arange(0, DV_BLOCK)
    for start in tl.range(begin, end, N, num_stages=STAGES):
        k = load_rows(
            k_source, batch, kv_head, start, end, k_b, k_h, k_t, N, D, D_BLOCK, True, False
        )
        scores = tl.dot(q, k.T, input_precision="ieee")
        tile = start + tl.arange(0, N)
        seen = real[:, None] & visible(
            rows[:, None], tile[None, :], stop_q, end, shift, window,
            mask, batch, heads[:, None], mask_b, mask_h, mask_t, mask_k,
            CAUSAL, WINDOW, HAS_MASK,
        )  # fmt: skip
        scores = tl.where(seen, scores, masked_score(NORMALIZER))
        raised = tl.maximum(maximum, tl.max(scores, 1) * scale)
        shift_2 = finite_shift(raised, NORMALIZER)
        above, below = terms(scores * scale, shift_2[:, None], NORMALIZER, True)
        lower = tl.math.exp2(maximum - shift_2)
        total = total * lower + tl.sum(below, 1)
        acc = acc * lower[:, None]
        maximum = raised
        wanted = tile < end
        if SKIP:
            wanted = wanted & (tl.max(above, 0) > 0)
        v_pointers = v_source + wide(batch) * v_b + wide(kv_head) * v_h
        v_pointers += wide(start) * v_t
        v = tl.load(
            v_pointers + tl.arange(0, N)[:, None] * v_t + v_columns[None, :],
            mask=wanted[:, None] & (v_columns[None, :] < DV),
            other=0.0,
        )
        acc = tl.dot(rounded(above, v.dtype, NORMALIZER, FUSED), v, acc, input_precision="ieee")

    if SPLIT:
        base = partial + (wide(tl.program_id(1)) * splits + split) * R * (DV_BLOCK + 2)
        pointers = base + index * (DV_BLOCK + 2)
        tl.store(pointers[:, None] + v_columns[None, :], acc)
        tl.store(pointers + DV_BLOCK, total)
        tl.store(pointers + DV_BLOCK + 1, maximum)
    else:
        out, lse = finish(acc, total, maximum, EPSILON, NORMALIZER)
        pointers = output + wide(batch) * o_b + wide(heads) * o_h + rows * o_t
        tl.store(
            pointers[:, None] + v_columns[None, :],
            out.to(output.dtype.element_ty),
            mask=real[:, None] & (v_columns[None, :] < DV),
        )
        lse_row = lse_out + (wide(batch) * kv_heads * group + heads) * queries
        tl.store(lse_row + rows, lse, mask=real)


@triton.jit(do_not_specialize=["queries", "keys", "splits"])
def join_kernel(
    output, lse_out, partial, spans, kv_heads, group, queries, keys, splits,
    o_b, o_h, o_t,
    NORMALIZER: tl.constexpr, SPANS: tl.constexpr, EPSILON: tl.constexpr,
    R: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one sequence and key head, always in the same order."""
    kv_head = tl.program_id(0) % kv_heads
    batch, start_q, stop_q, _, _, _ = sequence(
        spans, tl.program_id(0) // kv_heads, queries, keys, SPANS
    )
    count = tl.maximum(stop_q - start_q, 1)
    index = tl.arange(0, R)
    real = index < group * (stop_q - start_q)
    columns = tl.arange(0, DV_BLOCK)
    acc = tl.zeros([R, DV_BLOCK], tl.float32)
    total = tl.zeros([R], tl.float32)
    maximum = tl.full([R], first_maximum(NORMALIZER), tl.float32)
    for split in range(splits):
        base = partial + (wide(tl.program_id(0)) * splits + split) * R * (DV_BLOCK + 2)
        pointers = base + index * (DV_BLOCK + 2)
        their_maximum = tl.load(pointers + DV_BLOCK + 1)
        raised = tl.maximum(maximum, their_maximum)
        shift_2 = finite_shift(raised, NORMALIZER)
        ours = tl.math.exp2(maximum - shift_2)
        theirs = tl.math.exp2(their_maximum - shift_2)
        acc = acc * ours[:, None]
        acc += tl.load(pointers[:, None] + columns[None, :]) * theirs[:, None]
        total = total * ours + tl.load(pointers + DV_BLOCK) * theirs
        maximum = raised
    out, lse = finish(acc, total, maximum, EPSILON, NORMALIZER)
    rows = start_q + index % count
    heads = kv_head * group + index // count
    pointers = output + wide(batch) * o_b + wide(heads) * o_h + rows * o_t
    tl.store(
        pointers[:, None] + columns[None, :],
        out.to(output.dtype.element_ty),
        mask=real[:, None] & (columns[None, :] < DV),
    )
    lse_row = lse_out + (wide(batch) * kv_heads * group + heads) * queries
    tl.store(lse_row + rows, lse, mask=real)
