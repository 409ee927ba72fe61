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
from qbench.attention.kernels.modes import SCALED, SHAPED, SLOPED, SUMLESS
from qbench.attention.kernels.scores import (
    head_factor,
    log2_length,
    row_factor,
    row_level,
    row_scores,
    sink_of,
    slope_of,
)
from qbench.attention.kernels.sigmoid import sigmoid


@triton.jit(do_not_specialize=["queries", "keys", "window", "splits", "mask_b", "mask_h", "mask_t"])
def decode_kernel(
    q_source, k_source, v_source, output, lse_out, partial, mask, spans,
    sinks, bias, slopes, s, counts,
    head_counts, queries, keys, window, scale, inner, splits, strides,
    mask_b, mask_h, mask_t, mask_k,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, FUSED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program a sequence, key head and split; its BLOCK_R rows are the group's heads × queries.
    ``partial`` [sequences · kv_heads, splits, BLOCK_R, BLOCK_DV + 2], if there is more than one
    split, takes what each gives. ``head_counts``: key heads, and how many query heads share one.
    Strides, and what follows ``spans``, as in
    :func:`qbench.attention.kernels.forward.forward_kernel`."""
    kv_heads, group = head_counts
    q_strides, k_strides, v_strides, o_strides = strides
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    split = tl.program_id(0)
    kv_head = tl.program_id(1) % kv_heads
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // kv_heads, queries, keys
    )
    count = tl.maximum(stop_q - start_q, 1)
    index = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    real = index < group * (stop_q - start_q)
    rows = start_q + index % count  # [BLOCK_R]
    heads = kv_head * group + index // count  # [BLOCK_R]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    q_pointers = q_source + wide(batch) * q_strides[0] + wide(heads) * q_strides[1]
    q_pointers += rows * q_strides[2]
    q = tl.load(  # [BLOCK_R, BLOCK_D]
        q_pointers[:, None] + columns[None, :],
        mask=real[:, None] & (columns[None, :] < HEAD_DIM),
        other=0.0,
    )

    begin = start_k
    end = stop_k
    if CAUSAL:
        end = tl.minimum(stop_k, stop_q + shift)
    if WINDOW:
        begin = tl.maximum(begin, start_q + shift - window + 1)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_K), splits) * BLOCK_K
    begin += split * share
    end = tl.minimum(end, begin + share)
    limits = (stop_q, end, shift, window)

    known = tl.where(real, heads, kv_head * group)  # a head that is there
    value_row = (wide(batch) * kv_heads * group + known) * queries  # [BLOCK_R]
    row_limits = (stop_q, stop_k, shift, window)
    # [BLOCK_R]
    length = log2_length(rows, value_row, row_limits, start_k, counts, MODES, CAUSAL, WINDOW)
    factor = head_factor(known, s, MODES)
    gain = row_factor(length, factor, scale, MODES)
    slope = row_factor(length, factor, slope_of(known, slopes, MODES), MODES)
    if SCALED & MODES:
        gain = gain[:, None]
    level = row_level(length, known, bias, MODES)  # [BLOCK_R]
    if SLOPED & MODES:
        slope = slope[:, None]
    unit = scale
    if SHAPED & MODES:
        unit = 1.0

    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    maximum = tl.full([BLOCK_R], first_maximum(FAMILY), tl.float32)
    if SUMLESS & MODES:
        maximum = level
    v_columns = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = load_rows(  # [BLOCK_K, BLOCK_D]
            k_source, batch, kv_head, start, end, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
            True, False,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_R, BLOCK_K]
        tile = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        seen = real[:, None] & visible(  # [BLOCK_R, BLOCK_K]
            rows[:, None], tile[None, :], limits, mask, mask_strides, batch, heads[:, None],
            CAUSAL, WINDOW,
        )  # fmt: skip
        if SHAPED & MODES:
            scores = row_scores(
                scores, tile[None, :], rows[:, None] + shift, stop_q - 1 + shift,
                gain, inner, slope, level[:, None], MODES, FUSED,
            )  # fmt: skip
        scores = tl.where(seen, scores, masked_score(FAMILY))
        if SUMLESS & MODES:
            above = sigmoid(scores, FUSED, 0)
        else:
            raised = tl.maximum(maximum, tl.max(scores, 1) * unit)  # [BLOCK_R]
            shift_2 = finite_shift(raised, FAMILY)  # [BLOCK_R]
            above, below = terms(scores * unit, shift_2[:, None], FAMILY, True)
            lower = tl.math.exp2(maximum - shift_2)  # [BLOCK_R]
            total = total * lower + tl.sum(below, 1)  # [BLOCK_R]
            acc = acc * lower[:, None]
            maximum = raised
        wanted = tile < end  # [BLOCK_K]
        if SKIP:
            wanted = wanted & (tl.max(above, 0) > 0)
        v_pointers = v_source + wide(batch) * v_strides[0] + wide(kv_head) * v_strides[1]
        v_pointers += wide(start) * v_strides[2]
        v = tl.load(  # [BLOCK_K, BLOCK_DV]
            v_pointers + tl.arange(0, BLOCK_K)[:, None] * v_strides[2] + v_columns[None, :],
            mask=wanted[:, None] & (v_columns[None, :] < V_HEAD_DIM),
            other=0.0,
        )
        acc = tl.dot(rounded(above, v.dtype, FAMILY, FUSED), v, acc, input_precision="ieee")

    if partial is not None:
        first = (wide(tl.program_id(1)) * splits + split) * BLOCK_R
        pointers = partial + first * (BLOCK_DV + 2) + index * (BLOCK_DV + 2)  # [BLOCK_R]
        tl.store(pointers[:, None] + v_columns[None, :], acc)
        tl.store(pointers + BLOCK_DV, total)
        tl.store(pointers + BLOCK_DV + 1, maximum)
    else:
        sink = sink_of(known, sinks, MODES)
        # [BLOCK_R, BLOCK_DV], [BLOCK_R]
        out, lse = finish(acc, total, maximum, sink, FAMILY, MODES)
        pointers = output + wide(batch) * o_strides[0] + wide(heads) * o_strides[1]
        pointers += rows * o_strides[2]
        tl.store(
            pointers[:, None] + v_columns[None, :],
            out.to(output.dtype.element_ty),
            mask=real[:, None] & (v_columns[None, :] < V_HEAD_DIM),
        )
        lse_row = lse_out + (wide(batch) * kv_heads * group + heads) * queries
        tl.store(lse_row + rows, lse, mask=real)


@triton.jit(do_not_specialize=["queries", "keys", "splits"])
def join_kernel(
    output, lse_out, partial, spans, sinks, head_counts, queries, keys, splits, o_strides,
    FAMILY: tl.constexpr, MODES: tl.constexpr, BLOCK_R: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one sequence and key head, always in the same order."""
    kv_heads, group = head_counts
    kv_head = tl.program_id(0) % kv_heads
    batch, start_q, stop_q, _, _, _ = sequence(spans, tl.program_id(0) // kv_heads, queries, keys)
    count = tl.maximum(stop_q - start_q, 1)
    index = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    real = index < group * (stop_q - start_q)
    columns = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    maximum = tl.full([BLOCK_R], first_maximum(FAMILY), tl.float32)
    for split in range(splits):
        first = (wide(tl.program_id(0)) * splits + split) * BLOCK_R
        pointers = partial + first * (BLOCK_DV + 2) + index * (BLOCK_DV + 2)  # [BLOCK_R]
        their_maximum = tl.load(pointers + BLOCK_DV + 1)  # [BLOCK_R]
        if SUMLESS & MODES:
            acc += tl.load(pointers[:, None] + columns[None, :])
            maximum = their_maximum
        else:
            raised = tl.maximum(maximum, their_maximum)
            shift_2 = finite_shift(raised, FAMILY)
            ours = tl.math.exp2(maximum - shift_2)
            theirs = tl.math.exp2(their_maximum - shift_2)
            acc = acc * ours[:, None]
            acc += tl.load(pointers[:, None] + columns[None, :]) * theirs[:, None]
            total = total * ours + tl.load(pointers + BLOCK_DV) * theirs
            maximum = raised
    rows = start_q + index % count  # [BLOCK_R]
    heads = kv_head * group + index // count  # [BLOCK_R]
    sink = sink_of(tl.where(real, heads, kv_head * group), sinks, MODES)
    # [BLOCK_R, BLOCK_DV], [BLOCK_R]
    out, lse = finish(acc, total, maximum, sink, FAMILY, MODES)
    pointers = output + wide(batch) * o_strides[0] + wide(heads) * o_strides[1]
    pointers += rows * o_strides[2]
    tl.store(
        pointers[:, None] + columns[None, :],
        out.to(output.dtype.element_ty),
        mask=real[:, None] & (columns[None, :] < V_HEAD_DIM),
    )
    lse_row = lse_out + (wide(batch) * kv_heads * group + heads) * queries
    tl.store(lse_row + rows, lse, mask=real)
