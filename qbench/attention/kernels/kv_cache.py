"""Forward pass over a quantized KV cache: each query reads every key and value either as it was
written or as it is read back, see :mod:`qbench.attention.kv_cache`.

One program a block of queries, over the keys in tiles. A tile that all rows read from one source
costs what it does in the plain forward pass; only those where sources meet, at most a few a block,
are computed from both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qbench.attention import kernels as families
from qbench.attention.kernels import layouts
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
from qbench.attention.kernels.launch import empty_output
from qbench.attention.kernels.layouts import block, dense_rows, visible_counts
from qbench.attention.kernels.modes import SCALED, SHAPED, SUMLESS
from qbench.attention.kernels.scores import (
    head_factor,
    log2_length,
    row_factor,
    row_level,
    row_scores,
    sink_of,
    slope_of,
)
from qbench.attention.kernels.settings import Parameters, factors, kernel_modes
from qbench.attention.kernels.sigmoid import sigmoid
from qbench.attention.normalizers import NORMALIZERS

FAR = tl.constexpr(2**30)


@triton.jit
def bounds(position, first, recent, group):
    """The first position that a query at ``position`` reads unquantized."""
    return first + tl.maximum(position + 1 - recent - first, 0) // group * group


@triton.jit(
    do_not_specialize=[
        "queries", "keys", "window", "keep_first", "keep_recent", "key_group",
        "position_stride", "mask_b", "mask_h", "mask_t",
    ]
)  # fmt: skip
def two_source_kernel(
    q_source, k_source, v_source, ck_source, cv_source, output, positions, mask, spans,
    sinks, bias, slopes, s, counts,
    head_counts, queries, keys, window, keep_first, keep_recent, key_group, scale, inner,
    strides, position_stride, mask_b, mask_h, mask_t, mask_k,
    FAMILY: tl.constexpr, MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, FUSED: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program a block of BLOCK_Q queries and a head. ``positions`` [B or 1, Tk] int32;
    ``strides``: of batch row, head and row, of q, k, v, coded k, coded v and output each; others as
    in :func:`qbench.attention.kernels.forward.forward_kernel`."""
    heads, group = head_counts
    q_strides, k_strides, v_strides, ck_strides, cv_strides, o_strides = strides
    mask_strides = (mask_b, mask_h, mask_t, mask_k)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1) % heads
    kv_head = head // group
    batch, start_q, stop_q, start_k, stop_k, shift = sequence(
        spans, tl.program_id(1) // heads, queries, keys
    )
    first = start_q + program * BLOCK_Q
    if first >= stop_q:
        return
    limits = (stop_q, stop_k, shift, window)
    rows = first + tl.arange(0, BLOCK_Q)  # [BLOCK_Q]
    q = load_rows(  # [BLOCK_Q, BLOCK_D]
        q_source, batch, head, first, stop_q, q_strides, BLOCK_Q, HEAD_DIM, BLOCK_D, True, False
    )
    place = positions + wide(batch) * position_stride
    real = rows < stop_q
    own = tl.load(place + rows + shift, mask=real, other=0)  # [BLOCK_Q]
    key_bound = bounds(own, keep_first, keep_recent, key_group)
    value_bound = bounds(own, keep_first, keep_recent, 1)
    most_keys = tl.max(tl.where(real, key_bound, -FAR))
    most_values = tl.max(tl.where(real, value_bound, -FAR))
    least_keys = tl.min(tl.where(real, key_bound, FAR))
    least_values = tl.min(tl.where(real, value_bound, FAR))

    begin = start_k
    end = stop_k
    if CAUSAL:
        end = tl.minimum(stop_k, tl.minimum(first + BLOCK_Q, stop_q) + shift)
    if WINDOW:
        begin = tl.maximum(begin, first + shift - window + 1)
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
    unit = scale
    if SHAPED & MODES:
        unit = 1.0
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    maximum = tl.full([BLOCK_Q], first_maximum(FAMILY), tl.float32)
    for start in range(begin, end, BLOCK_K):
        tile = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        at = tl.load(place + tile, mask=tile < stop_k, other=FAR)  # [BLOCK_K]
        nearest = tl.min(at)
        farthest = tl.max(tl.where(tile < stop_k, at, -FAR))
        written = at >= keep_first
        # where nothing of a tile is read from a source, that source is not read at all
        plain_keys = (nearest < keep_first) | (farthest >= least_keys)
        plain_values = (nearest < keep_first) | (farthest >= least_values)
        coded_keys = (farthest >= keep_first) & (nearest < most_keys)
        coded_values = (farthest >= keep_first) & (nearest < most_values)

        scores = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        if plain_keys:
            k = load_rows(  # [BLOCK_K, BLOCK_D]
                k_source, batch, kv_head, start, stop_k, k_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
                True, False,
            )  # fmt: skip
            scores = tl.dot(q, k.T, input_precision="ieee")
        if coded_keys:
            k = load_rows(
                ck_source, batch, kv_head, start, stop_k, ck_strides, BLOCK_K, HEAD_DIM, BLOCK_D,
                True, False,
            )  # fmt: skip
            coded = tl.dot(q, k.T, input_precision="ieee")
            scores = tl.where(written[None, :] & (at[None, :] < key_bound[:, None]), coded, scores)
        if SHAPED & MODES:
            scores = row_scores(
                scores, tile[None, :], rows[:, None] + shift, first + shift,
                gain, inner, slope, level[:, None], MODES, FUSED,
            )  # fmt: skip
        seen = visible(  # [BLOCK_Q, BLOCK_K]
            rows[:, None], tile[None, :], limits, mask, mask_strides, batch, head, CAUSAL, WINDOW
        )
        seen = seen & (tile[None, :] < stop_k)
        scores = tl.where(seen, scores, masked_score(FAMILY))
        if SUMLESS & MODES:
            above = sigmoid(scores, FUSED, 0)
        else:
            raised = tl.maximum(maximum, tl.max(scores, 1) * unit)  # [BLOCK_Q]
            shift_2 = finite_shift(raised, FAMILY)
            above, below = terms(scores * unit, shift_2[:, None], FAMILY, True)
            lower = tl.math.exp2(maximum - shift_2)
            total = total * lower + tl.sum(below, 1)
            acc = acc * lower[:, None]
            maximum = raised
        if SKIP:
            some = tl.max(above) > 0
            plain_values = plain_values & some
            coded_values = coded_values & some
        weights = rounded(above, v_source.dtype.element_ty, FAMILY, FUSED)  # [BLOCK_Q, BLOCK_K]
        none = tl.zeros([BLOCK_Q, BLOCK_K], weights.dtype)
        of_value = written[None, :] & (at[None, :] < value_bound[:, None])
        if plain_values:
            v = load_rows(  # [BLOCK_K, BLOCK_DV]
                v_source, batch, kv_head, start, stop_k, v_strides, BLOCK_K, V_HEAD_DIM, BLOCK_DV,
                True, False,
            )  # fmt: skip
            acc = tl.dot(tl.where(of_value, none, weights), v, acc, input_precision="ieee")
        if coded_values:
            v = load_rows(
                cv_source, batch, kv_head, start, stop_k, cv_strides, BLOCK_K, V_HEAD_DIM, BLOCK_DV,
                True, False,
            )  # fmt: skip
            acc = tl.dot(tl.where(of_value, weights, none), v, acc, input_precision="ieee")

    sink = sink_of(head, sinks, MODES)
    out, _ = finish(acc, total, maximum, sink, FAMILY, MODES)  # [BLOCK_Q, BLOCK_DV]
    columns = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    pointers = output + wide(batch) * o_strides[0] + wide(head) * o_strides[1]
    pointers += wide(first) * o_strides[2]
    inside = (rows[:, None] < stop_q) & (columns[None, :] < V_HEAD_DIM)
    tl.store(
        pointers + tl.arange(0, BLOCK_Q)[:, None] * o_strides[2] + columns[None, :],
        out.to(output.dtype.element_ty),
        mask=inside,
    )


def attention(
    query: Tensor,
    sources: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    keep_first: int,
    keep_recent: int,
    key_group: int,
    positions: Tensor,
    normalizer: str,
    parameters: Parameters,
    scale: float | None,
    softcap: float,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    spans: Tensor | None,
    max_seqlen_q: int | None,
) -> Tensor:
    """As ``qbench.attention.kv_cache.attention``; ``spans`` and ``max_seqlen_q`` as
    ``kernels.attention``. For inference only."""
    kernels = families.require(normalizer)
    key, value, coded_key, coded_value = map(dense_rows, sources)
    query = dense_rows(query)
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    v_width = value.shape[3]
    output, _ = empty_output(query, value, covered=spans is None)
    if output.numel() == 0:
        return output
    assert positions.dtype == torch.int32
    assert positions.stride(1) == 1
    longest = max_seqlen_q or queries
    gain, inner = factors(scale or width**-0.5, softcap)
    counts = visible_counts(mask, query, key, kernels, parameters, causal, window or 0)
    few = longest <= 16 or query.dtype == torch.float32
    block_q, block_k = (16 if longest <= 16 else 32, 32) if few else (64, 64)
    sequences = batch if spans is None else spans.shape[0]
    tensors = (query, key, value, coded_key, coded_value, output)
    two_source_kernel[(triton.cdiv(longest, block_q), heads * sequences)](
        *tensors, positions, mask, spans, *parameters, counts, (heads, heads // kv_heads), queries,
        keys, window or 0, keep_first, keep_recent, key_group, gain, inner,
        layouts.strides_of(*tensors),
        positions.stride(0) if positions.shape[0] > 1 else 0, *layouts.mask_strides(mask),
        FAMILY=kernels.family, MODES=kernel_modes(kernels, parameters, softcap), CAUSAL=causal,
        WINDOW=bool(window), SKIP=NORMALIZERS.get(normalizer).sparse,
        FUSED=layouts.fused(query),
        BLOCK_Q=block_q, BLOCK_K=block_k, HEAD_DIM=width, BLOCK_D=block(width),
        V_HEAD_DIM=v_width, BLOCK_DV=block(v_width), num_warps=4,
    )  # fmt: skip
    return output
