"""From tensors to kernel launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from qbench.attention import kernels as families
from qbench.attention.kernels import tiles
from qbench.attention.kernels.backward_keys import key_kernel
from qbench.attention.kernels.backward_queries import query_kernel
from qbench.attention.kernels.decode import decode_kernel, join_kernel
from qbench.attention.kernels.empty import empty_flags, empty_output
from qbench.attention.kernels.forward import forward_kernel
from qbench.attention.kernels.layouts import (
    INTERPRETED,
    block,
    dense_rows,
    descriptor,
    fused,
    mask_strides,
    strides_of,
    tma_layout,
    visible_counts,
)
from qbench.attention.kernels.recall import Call, about, again, recalled, remember
from qbench.attention.kernels.relaunch import described, launch, noted, prepare_thread
from qbench.attention.kernels.settings import Parameters, Settings, factors, kernel_modes
from qbench.attention.kernels.tiles import Tile
from qbench.attention.normalizers import NORMALIZERS, Kernels

try:  # Gluon is Triton's, but still experimental
    from qbench.attention.kernels import gluon_backward, gluon_forward, lasting
except ImportError:
    gluon_backward = None

DECODE_ROWS = 64  # at most so many heads × queries that share keys are decoded together
DECODE_PROGRAMS = 132 * 8  # keys are split until an H200 has this many programs


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _decoded(kernels: Kernels, rows: int) -> bool:
    """Whether so many ``rows``, of all heads that share keys, are computed as in decoding."""
    return kernels.decode and rows <= DECODE_ROWS


def enough() -> int | None:
    """What chooses between backward kernels beside the tensors."""
    return None if gluon_backward is None else gluon_backward.ENOUGH


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spans: Tensor | None,
    parameters: Parameters, settings: Settings, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, lse, and :func:`empty_flags`, filled."""
    prepare_thread(query.device)
    # Keys grow with every token that is decoded: no such call is like another.
    few = settings.max_seqlen_q * (query.shape[1] // key.shape[1]) <= DECODE_ROWS
    if INTERPRETED or few or mask is not None or spans is not None or tile is not None:
        return _forward(query, key, value, mask, spans, parameters, settings, tile)
    given = (query, key, value, *parameters)
    key_of_call = about("forward", given, settings)
    call = recalled(key_of_call)
    if call is not None:
        return tuple(call(given))
    with noted() as launches:
        output, lse, imprecise = _forward(query, key, value, None, None, parameters, settings)
    if launches and all(tensor.stride(3) == 1 for tensor in (query, key, value)):
        kernels = NORMALIZERS.get(settings.normalizer).kernels
        zeros = families.FAMILIES[kernels.family].near_zero
        made = [(output, again(output)), (lse, again(lse)), (imprecise, again(imprecise, zeros))]
        remember(key_of_call, Call(launches, given, made))
    return output, lse, imprecise


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spans: Tensor | None,
    parameters: Parameters, settings: Settings, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    normalizer, scale, softcap, causal, window, max_seqlen_q, max_seqlen_k = settings
    sinks, bias, slopes, s = parameters
    kernels = families.require(normalizer)
    family = families.FAMILIES[kernels.family]
    skippable = NORMALIZERS.get(normalizer).sparse
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    v_width = value.shape[3]
    group = heads // kv_heads
    output, lse = empty_output(query, value, covered=spans is None)
    imprecise = empty_flags(query, key, normalizer)
    if output.numel() == 0:
        return output, lse, imprecise
    query, key, value = (dense_rows(tensor) for tensor in (query, key, value))
    sequences = batch if spans is None else spans.shape[0]
    device = query.device.index
    modes = kernel_modes(kernels, parameters, softcap)
    modes |= tiles.arithmetic(width, kernels.family, softcap, modes, backward=False)
    gain, inner = factors(scale, softcap)
    counts = visible_counts(mask, query, key, kernels, parameters, causal, window)
    common = {
        "FAMILY": kernels.family, "MODES": modes, "CAUSAL": causal, "WINDOW": window > 0,
        "HEAD_DIM": width, "BLOCK_D": block(width),
        "V_HEAD_DIM": v_width, "BLOCK_DV": block(v_width),
    }  # fmt: skip
    strides = strides_of(query, key, value, output)
    if _decoded(kernels, group * max_seqlen_q):
        tile = tile or tiles.decode_tile(block(width), query.dtype)
        rows = max(16, triton.next_power_of_2(group * max_seqlen_q))
        pairs = sequences * kv_heads
        splits = min(_blocks(DECODE_PROGRAMS, pairs), _blocks(max_seqlen_k, 4 * tile.block_k))
        splits = max(1, splits)
        partial = None
        if splits > 1:
            shape = (pairs, splits, rows, block(v_width) + 2)
            partial = query.new_empty(shape, dtype=torch.float32)
        launch(
            decode_kernel, (splits, pairs), device,
            [query, key, value, output, lse, partial, mask, spans, sinks, bias, slopes, s, counts],
            ((kv_heads, group), queries, keys, window, gain, inner, splits, strides,
             *mask_strides(mask)),
            {"SKIP": tile.skip and skippable, "FUSED": fused(query), "BLOCK_R": rows,
             **tile.launch, **common},
        )  # fmt: skip
        if splits > 1:
            launch(
                join_kernel, (pairs, 1), device, [output, lse, partial, spans, sinks],
                ((kv_heads, group), queries, keys, splits, output.stride()[:3]),
                {"FAMILY": kernels.family, "MODES": modes, "BLOCK_R": rows,
                 "V_HEAD_DIM": v_width, "BLOCK_DV": block(v_width)},
            )  # fmt: skip
        return output, lse, imprecise
    tile = tile or tiles.forward_tile(block(width), query.dtype, kernels.family, modes)
    if (
        (tile.gluon or tile.lasting)
        and gluon_backward is not None
        and not INTERPRETED
        and mask is None
        and spans is None
        and all(map(tma_layout, (query, key, value)))
    ):
        plain = (query, key, value, causal, window)
        if tile.lasting and lasting.fits(*plain, kernels.family, modes, softcap, tile.lasting):
            lasting.forward(query, key, value, output, lse, scale, softcap, tile.lasting)
            return output, lse, imprecise
        # A bias was not tried on a GPU.
        if tile.gluon and bias is None and gluon_forward.fits(*plain, modes):
            gluon_forward.forward(
                query, key, value, output, lse, parameters, kernels.family, modes, scale, softcap,
                tile,
            )  # fmt: skip
            return output, lse, imprecise
    sources = (key, value)
    tma = tile.tma and all(map(tma_layout, sources))
    if tma:
        sources = [described(descriptor, source, tile.block_k) for source in sources]
    launch(
        forward_kernel, (_blocks(max_seqlen_q, tile.block_q), heads * sequences), device,
        [query, *sources, output, lse, imprecise, mask, spans, sinks, bias, slopes, s, counts],
        ((heads, group), queries, keys, window, gain, inner, strides, *mask_strides(mask)),
        {"PRECISE": query.dtype == torch.float32, "NEAR_ZERO": family.near_zero,
         "FREE": tile.free and kernels.family != "sigmoid", "TMA": tma,
         "FUSED": fused(query), "SKIP": tile.skip and skippable,
         "MEND": tile.mend and family.near_zero and window == 0 and mask is None,
         "BLOCK_Q": tile.block_q, **tile.launch, **common},
    )  # fmt: skip
    return output, lse, imprecise


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    imprecise: Tensor, mask: Tensor | None, spans: Tensor | None,
    parameters: Parameters, settings: Settings, learning: bool = False,
    sloping: bool = False, key_tile: Tile | None = None, query_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of query, key and value, laid out as the output is; where ``learning``, that of
    bias, sinks or s [heads], whichever the normalizer learns; and where ``sloping`` that of the
    slopes [heads]."""
    prepare_thread(query.device)
    more = (mask, spans, key_tile, query_tile)
    if INTERPRETED or learning or sloping or any(each is not None for each in more):
        return _backward(
            gradient, query, key, value, output, lse, imprecise, mask, spans, parameters,
            settings, learning, sloping, key_tile, query_tile,
        )  # fmt: skip
    given = (gradient, query, key, value, output, lse, imprecise, *parameters)
    key_of_call = about(enough(), given, settings)
    call = recalled(key_of_call)
    if call is not None:
        return (*call(given), None, None)
    with noted() as launches:
        results = _backward(
            gradient, query, key, value, output, lse, imprecise, None, None, parameters, settings
        )
    if launches and all(tensor.stride(3) == 1 for tensor in given[:4]):
        remember(key_of_call, Call(launches, given, [(made, again(made)) for made in results[:3]]))
    return results


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    imprecise: Tensor, mask: Tensor | None, spans: Tensor | None,
    parameters: Parameters, settings: Settings, learning: bool = False,
    sloping: bool = False, key_tile: Tile | None = None, query_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    normalizer, scale, softcap, causal, window, max_seqlen_q, max_seqlen_k = settings
    sinks, _, slopes, s = parameters
    kernels = families.require(normalizer, gradients=True)
    family = families.FAMILIES[kernels.family]
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    v_width = value.shape[3]
    group = heads // kv_heads
    make = torch.empty if spans is None else torch.zeros
    like = {"dtype": query.dtype, "device": query.device}
    dq = make((batch, queries, heads, width), **like).transpose(1, 2)
    dk = make((batch, keys, kv_heads, width), **like).transpose(1, 2)
    dv = make((batch, keys, kv_heads, v_width), **like).transpose(1, 2)
    if query.numel() == 0 or key.numel() == 0:
        none = (lse.new_zeros(heads) if asked else None for asked in (learning, sloping))
        return dq.zero_(), dk.zero_(), dv.zero_(), *none
    query, key, value, gradient = (dense_rows(t) for t in (query, key, value, gradient))
    modes = kernel_modes(kernels, parameters, softcap, learning, sloping)
    modes |= tiles.arithmetic(width, kernels.family, softcap, modes, backward=True)
    gain, inner = factors(scale, softcap)
    # Rows outside the sequences give nothing to the gradients of parameters.
    make = torch.empty_like if spans is None else torch.zeros_like
    rows, tilts = (make(lse) if asked else None for asked in (learning, sloping))
    if (
        gluon_backward is not None
        and kernels.gluon
        and not INTERPRETED
        and mask is None
        and spans is None
        and key_tile is None
        and query_tile is None
        and gluon_backward.fits(query, key, value, causal, window, modes)
        and all(map(tma_layout, (query, key, value, gradient)))
    ):
        gluon_backward.backward(
            gradient, query, key, value, output, lse, imprecise, dq, dk, dv, rows, tilts,
            parameters, kernels.family, modes, scale, softcap,
        )  # fmt: skip
        return dq, dk, dv, _by_head(rows), _by_head(tilts)
    deltas = torch.empty_like(lse)
    sequences = batch if spans is None else spans.shape[0]
    device = query.device.index
    counts = visible_counts(mask, query, key, kernels, parameters, causal, window)
    common = {
        "FAMILY": kernels.family, "MODES": modes, "FUSED": fused(query), "CAUSAL": causal,
        "WINDOW": window > 0, "HEAD_DIM": width, "BLOCK_D": block(width), "V_HEAD_DIM": v_width,
        "BLOCK_DV": block(v_width),
    }  # fmt: skip
    tile = query_tile or tiles.query_tile(block(width), query.dtype)
    sources = [query, key, value, gradient]
    tma = tile.tma and tma_layout(key) and tma_layout(value)
    if tma:
        sources[1:3] = (described(descriptor, source, tile.block_k) for source in (key, value))
    launch(
        query_kernel, (_blocks(max_seqlen_q, tile.block_q), heads * sequences), device,
        [*sources, output, lse, deltas, dq, rows, tilts, mask, spans, sinks, slopes, s, counts],
        ((heads, group), queries, keys, window, scale, gain, inner,
         strides_of(query, key, value, gradient, output, dq), *mask_strides(mask)),
        {"NEAR_ZERO": family.near_zero, "TMA": tma, "BLOCK_Q": tile.block_q, **tile.launch,
         **common},
    )  # fmt: skip
    # Decoding is precise and sets no flags.
    unflagged = family.near_zero and _decoded(kernels, group * max_seqlen_q)
    precise = query.dtype == torch.float32 or unflagged
    tile = key_tile or tiles.key_tile(block(width), query.dtype)
    sources = [query, key, value, gradient]
    tma = tile.tma and tma_layout(query) and tma_layout(gradient)
    if tma:
        sources[0], sources[3] = (
            described(descriptor, source, tile.block_q) for source in (query, gradient)
        )
    launch(
        key_kernel, (_blocks(max_seqlen_k, tile.block_k), kv_heads * sequences), device,
        [*sources, lse, deltas, imprecise, dk, dv, mask, spans, slopes, s, counts],
        ((kv_heads, group), queries, keys, window, scale, gain, inner,
         strides_of(query, key, value, gradient, dk, dv), *mask_strides(mask)),
        {"NEAR_ZERO": family.near_zero, "PRECISE": precise, "TMA": tma,
         "BLOCK_Q": tile.block_q, **tile.launch, **common},
    )  # fmt: skip
    return dq, dk, dv, _by_head(rows), _by_head(tilts)


def _by_head(rows: Tensor | None) -> Tensor | None:
    """What rows [B, H, T] give, summed [H], where that was asked for."""
    return None if rows is None else rows.sum((0, 2))
