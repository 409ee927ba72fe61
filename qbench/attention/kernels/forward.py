"""Forward pass: one program a block of queries, over the keys in tiles.

The keys of a block fall into three ranges: tiles that some row may see only in part (left of a
sliding window), tiles that every row sees whole, and tiles cut by causality or the end of the
sequence. Only the first and last need masks, and only they pay for them.

FREE leaves out the running maximum: in bf16, whose exponent is float32's, e^x itself neither
overflows nor loses bits for scores of any trained model, so the sums need no rescaling and a
softpick score costs half the instructions. Afterwards each block checks its sums; one that did
leave the safe range is computed again with the running maximum. ε then stands beside Σ |e^x − 1|
instead of its e^−m-fold, which changes the denominator by at most 1e-6 of itself.

With MEND, which is for FREE, a block with rows of tiny scores is not computed again where the sums
of these rows are right: see :mod:`qbench.attention.kernels.mending`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qbench.attention.kernels.family import (
    CHUNK,
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
from qbench.attention.kernels.mending import mended, set_flags
from qbench.attention.kernels.modes import SCALED, SHAPED, SHARED, SUMLESS
from qbench.attention.kernels.scores import (
    head_factor,
    log2_length,
    row_factor,
    row_level,
    row_scores,
    shared_places,
    shared_scores,
    sink_of,
    slope_of,
)
from qbench.attention.kernels.sigmoid import sigmoid


@triton.jit
def sweep(
    acc, total, maximum, tiny, flags, q, rows, begin, end, k_source, v_source, mask, scale, shaping,
    places, k_strides, v_strides, mask_strides, index, limits,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, FREE: tl.constexpr, NEAR_ZERO: tl.constexpr, PRECISE: tl.constexpr,
    SKIP: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes the keys from ``begin`` to ``end`` into the running output acc [BLOCK_Q, BLOCK_DV],
    sum and maximum [BLOCK_Q], which are [BLOCK_Q, 8] with FREE. ``index``: batch row, query head
    and key head. ``limits``: see :func:`qbench.attention.kernels.family.visible`. ``shaping``:
    what scores.row_scores takes after the positions; ``scale`` is 1 where it has been applied.
    ``flags``: of each CHUNK of keys, set where one of the rows that are ``tiny`` has a positive
    score there; both may be None. ``places`` [BLOCK_Q] or None: scores.shared_places."""
    batch, head, kv_head = index
    gain, inner, slope, level = shaping
    stop_k = limits[1]
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = load_rows(  # [BLOCK_K, BLOCK_D]
            k_source, batch, kv_head, start, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
            MASKED, TMA,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        keys = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        if places is not None:
            scores = shared_scores(scores, keys[None, :], places[:, None], start, gain, slope)
        elif SHAPED & MODES:
            # From the tile's first key: what slopes take from keys is the same in all tiles.
            ahead = tl.arange(0, BLOCK_K)[None, :]
            own = rows[:, None] + (limits[2] - start)
            scores = row_scores(scores, ahead, own, 0, gain, inner, slope, level, MODES, FUSED)
        if MASKED:
            seen = visible(  # [BLOCK_Q, BLOCK_K]
                rows[:, None], keys[None, :], limits, mask, mask_strides, batch, head,
                CAUSAL, WINDOW,
            )  # fmt: skip
            scores = tl.where(seen, scores, masked_score(FAMILY))
        if tiny is not None:  # noqa: SIM102 (one is known at compile time)
            if tl.max((tiny[:, None] & (scores > 0)).to(tl.int32)) > 0:
                set_flags(flags, start, stop_k, BLOCK_K)
        if SUMLESS & MODES:
            # Two together are held above −63; what is not seen gives 0.
            above = sigmoid(scores, FUSED, 0 if MASKED else MODES)
        elif FREE:
            # Eight sums a row, so that no thread needs another's until the end.
            above, below = terms(scores * scale, 0.0, FAMILY, False)  # [BLOCK_Q, BLOCK_K] each
            total += tl.sum(tl.reshape(below, [BLOCK_Q, BLOCK_K // 8, 8]), 1)  # [BLOCK_Q, 8]
            if NEAR_ZERO:  # for the check at the end
                highest = tl.max(tl.reshape(scores, [BLOCK_Q, BLOCK_K // 8, 8]), 1)
                maximum = tl.maximum(maximum, highest)  # [BLOCK_Q, 8]
        else:
            raised = tl.maximum(maximum, tl.max(scores, 1) * scale)  # [BLOCK_Q]
            shift_2 = finite_shift(raised, FAMILY)  # [BLOCK_Q]
            above, below = terms(scores * scale, shift_2[:, None], FAMILY, PRECISE)
            lower = tl.math.exp2(maximum - shift_2)  # [BLOCK_Q]
            total = total * lower + tl.sum(below, 1)  # [BLOCK_Q]
            acc = acc * lower[:, None]
            maximum = raised
        if SKIP:
            if tl.max(scores) > 0:
                v = load_rows(  # [BLOCK_K, BLOCK_DV]
                    v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM,
                    BLOCK_DV, MASKED, TMA,
                )  # fmt: skip
                weights = rounded(above, v.dtype, FAMILY, FUSED)  # [BLOCK_Q, BLOCK_K]
                acc = tl.dot(weights, v, acc, input_precision="ieee")
        else:
            v = load_rows(  # [BLOCK_K, BLOCK_DV]
                v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM,
                BLOCK_DV, MASKED, TMA,
            )  # fmt: skip
            weights = rounded(above, v.dtype, FAMILY, FUSED)  # [BLOCK_Q, BLOCK_K]
            acc = tl.dot(weights, v, acc, input_precision="ieee")
    return acc, total, maximum


@triton.jit(do_not_specialize=["queries", "keys", "window", "mask_b", "mask_h", "mask_t"])
def forward_kernel(
    q_source, k_source, v_source, output, lse_out, imprecise, mask, spans,
    sinks, bias, slopes, s, counts,
    head_counts, queries, keys, window, scale, inner, strides, mask_b, mask_h, mask_t, mask_k,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    FREE: tl.constexpr, NEAR_ZERO: tl.constexpr, PRECISE: tl.constexpr, SKIP: tl.constexpr,
    MEND: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a block of BLOCK_Q queries and a head. ``head_counts``: query heads, and how
    many share a key head. ``strides``: of batch row, head and row, of q, k, v and output each.
    The mask's stay by themselves: inside a tuple Triton would compile for their values.
    ``imprecise`` [B, key heads, chunks of keys]: the flags of :func:`sweep`, zeros before.
    ``sinks``, ``bias``, ``slopes``, ``s`` [heads] and ``counts`` [B, heads, queries]: see
    :mod:`qbench.attention.kernels.scores`; ``scale`` and ``inner``: see ``launch.factors``."""
    heads, group = head_counts
    q_strides, k_strides, v_strides, o_strides = strides
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    # Causal blocks at the end have the most keys: they start first, so that none starts late.
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

    unit = scale
    value_row = (wide(batch) * heads + head) * queries
    # [BLOCK_Q]
    length = log2_length(rows, value_row, limits, start_k, counts, MODES, CAUSAL, WINDOW)
    factor = head_factor(head, s, MODES)
    gain = row_factor(length, factor, scale, MODES)
    slope = row_factor(length, factor, slope_of(head, slopes, MODES), MODES)
    if SCALED & MODES:
        gain = gain[:, None]
        slope = slope[:, None]
    level = row_level(length, head, bias, MODES)  # [BLOCK_Q]
    shaping = (gain, inner, slope, level[:, None])
    if SHAPED & MODES:
        unit = 1.0

    places = None
    if SHARED & MODES and FREE and CAUSAL:
        places = shared_places(first + shift, BLOCK_Q)  # [BLOCK_Q]
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    if FREE:
        total = tl.zeros([BLOCK_Q, 8], tl.float32)
        maximum = tl.zeros([BLOCK_Q, 8], tl.float32)
    else:
        total = tl.zeros([BLOCK_Q], tl.float32)
        maximum = tl.full([BLOCK_Q], first_maximum(FAMILY), tl.float32)
    if WINDOW:
        acc, total, maximum = sweep(
            acc, total, maximum, None, None, q, rows, begin, whole_begin, k_source, v_source, mask,
            unit, shaping, places, k_strides, v_strides, mask_strides, index, limits, FAMILY, MODES,
            CAUSAL, WINDOW, True, FREE, NEAR_ZERO, PRECISE, SKIP, TMA, FUSED, BLOCK_Q, BLOCK_K,
            HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, STAGES,
        )  # fmt: skip
    if mask is None:
        acc, total, maximum = sweep(
            acc, total, maximum, None, None, q, rows, whole_begin, whole_end, k_source, v_source,
            mask, unit, shaping, places, k_strides, v_strides, mask_strides, index, limits, FAMILY,
            MODES, CAUSAL, WINDOW, False, FREE, NEAR_ZERO, PRECISE, SKIP, TMA, FUSED, BLOCK_Q,
            BLOCK_K, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, STAGES,
        )  # fmt: skip
    if MEND:
        earlier = tl.max(maximum, 1)  # [BLOCK_Q], before the last tiles
    acc, total, maximum = sweep(
        acc, total, maximum, None, None, q, rows, whole_end, end, k_source, v_source, mask, unit,
        shaping, places, k_strides, v_strides, mask_strides, index, limits,
        FAMILY, MODES, CAUSAL, WINDOW, True, FREE, NEAR_ZERO, PRECISE, SKIP, TMA, FUSED,
        BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, STAGES,
    )  # fmt: skip

    if FREE:
        total = tl.sum(total, 1)  # [BLOCK_Q]
        maximum = tl.max(maximum, 1) * unit  # [BLOCK_Q]
    if SUMLESS & MODES:
        maximum = level
    elif FREE or (NEAR_ZERO and not PRECISE):
        again = tl.zeros([BLOCK_Q], tl.int1)
        tiny = None
        flags = None
        if NEAR_ZERO:
            again = (maximum > 0) & (maximum < SMALL_MAXIMUM)
            tiny = again & (rows < stop_q)
            chunks = tl.cdiv(keys, CHUNK)
            flags = imprecise + (wide(batch) * (heads // group) + head // group) * chunks
        if FREE:
            if MEND:  # the sums of other rows are right
                again = again & (total < (end - begin).to(tl.float32) * SMALL_MAXIMUM)
            again = again | lost_bits(total, FAMILY)
        if tl.max((again & (rows < stop_q)).to(tl.int32)) > 0:
            acc, total, maximum = sweep(
                tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32), tl.zeros([BLOCK_Q], tl.float32),
                tl.full([BLOCK_Q], first_maximum(FAMILY), tl.float32), tiny, flags,
                q, rows, begin, end, k_source, v_source, mask, unit, shaping, None,
                k_strides, v_strides, mask_strides, index, limits,
                FAMILY, MODES, CAUSAL, WINDOW, True, False, NEAR_ZERO, True, False, TMA, FUSED,
                BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, 1,
            )  # fmt: skip

        elif FREE:
            maximum = tl.zeros([BLOCK_Q], tl.float32)
            if places is not None:
                maximum = (places - rows - shift).to(tl.float32) * slope
            if MEND:
                acc = mended(
                    acc, tiny, earlier, flags, q, rows, begin, whole_end, end, k_source, v_source,
                    mask, unit, shaping, k_strides, v_strides, mask_strides, index, limits,
                    FAMILY, MODES, CAUSAL, WINDOW, TMA, FUSED, BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D,
                    V_HEAD_DIM, BLOCK_DV,
                )  # fmt: skip
    sink = sink_of(head, sinks, MODES)
    # [BLOCK_Q, BLOCK_DV], [BLOCK_Q]
    out, lse = finish(acc, total, maximum, sink, FAMILY, MODES)
    columns = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    pointers = output + wide(batch) * o_strides[0] + wide(head) * o_strides[1]
    pointers += wide(first) * o_strides[2]
    inside = (rows[:, None] < stop_q) & (columns[None, :] < V_HEAD_DIM)  # [BLOCK_Q, BLOCK_DV]
    tl.store(
        pointers + tl.arange(0, BLOCK_Q)[:, None] * o_strides[2] + columns[None, :],
        out.to(output.dtype.element_ty),
        mask=inside,
    )
    tl.store(lse_out + value_row + rows, lse, mask=rows < stop_q)
