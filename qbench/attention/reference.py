"""Attention in plain PyTorch: the definition that every kernel is compared with. What turns scores
into weights is in a file per normalizer. Computes in float64 for float64 inputs, else in float32;
the result is rounded once, to the inputs' dtype. Queries are taken in chunks, so that memory grows
linearly with their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from qbench.attention.normalizers import NORMALIZERS, SLOPES, Normalizer

CHUNK_SCORES = 1 << 19  # scores held at once: 2 MiB in float32, what a core's cache holds


class Chunk(NamedTuple):
    """Scores [B, Hq, R, N] of R queries over N keys, which of these each query may see (bool,
    broadcast to the scores; None: all), and which keys these are."""

    scores: Tensor
    allowed: Tensor | None
    keys: slice


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    seq_bounds: Tensor | None = None,
) -> Tensor:
    """Compute attention of query [B, Hq, Tq, D], key [B, Hkv, Tk, D] and value [B, Hkv, Tk, Dv].

    ``parameters``: the normalizer's, by name. ``scale``: factor of the scores, 1/√D by default.
    ``softcap`` c: scores x become c · tanh(x / c) (Gemma 2), before ALiBi's slopes and the rest.
    ``mask``: bool, [B or 1, Hq or 1, Tq, Tk], True = attend. ``causal`` aligns the last query with
    the last key; ``window`` lets a query see that many keys up to and with its own, and without
    ``causal`` all later ones. ``seq_bounds`` (see :mod:`qbench.attention.kernels.varlen`):
    sequences inside the batch rows, without a mask, the last query of each aligned with its last
    key; none sees another. A query with nothing to attend to, or outside every sequence, gives 0.
    Returns [B, Hq, Tq, Dv], in the dtype of torch.autocast if that is on.

    Raises RecipeError for an unknown normalizer, UnavailableError for a parameter that it does not
    have or that is missing, ValueError for shapes that do not fit."""
    query, key, value = autocast(query, key, value)
    chosen = NORMALIZERS[normalizer]
    check(query, key, value, mask, seq_bounds)
    given = chosen.checked(parameters, query.shape[1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    settings = {"scale": scale, "softcap": softcap, "mask": mask, "causal": causal}
    if seq_bounds is not None:
        settings |= {"normalizer": normalizer, "parameters": parameters, "window": window}
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        for queries, keys in sequences(seq_bounds):
            output[queries] = attention(query[queries], key[keys], value[keys], **settings)
        return output
    with torch.autocast(query.device.type, enabled=False):
        if not window and not softcap and not given:
            output = chosen.attention(query, key, value, scale=scale, mask=mask, causal=causal)
            if output is not None:
                return output
        values = upcast(value).contiguous()  # products round by layout, see chunks
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in given.values())
        outputs = []
        for scores, allowed, keys in chunks(query, key, chosen, given, window=window, **settings):
            seen = {"allowed": allowed, "parameters": given}
            # A faster way may look at what it computes, which a compiler cannot follow.
            inference = not (scores.requires_grad or learning or torch.compiler.is_compiling())
            fraction = chosen.fraction(scores, **seen) if inference else None
            if fraction is not None:
                numerator, denominator = fraction
                outputs.append(grouped_matmul(numerator, values[:, :, keys]).div_(denominator))
            else:
                outputs.append(grouped_matmul(chosen.weights(scores, **seen), values[:, :, keys]))
        return torch.cat(outputs, dim=2).to(query.dtype)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``tensors`` in the dtype of torch.autocast if it is on, as torch's own attention does.
    float64 stays, as everywhere under autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seq_bounds: Tensor | None = None
) -> None:
    """Raise ValueError if the shapes do not fit together, if the mask is not bool, or if there are
    a mask and ``seq_bounds``, which are not checked themselves."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [B, H, T, D]; it is {tuple(tensor.shape)}")
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    if key.shape != (batch, kv_heads, keys, width) or value.shape[:3] != (batch, kv_heads, keys):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "do not fit; [B, Hq, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv] do"
        )
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads: {heads} and {kv_heads}")
    if mask is None:
        return
    if seq_bounds is not None:
        raise ValueError("mask and seq_bounds both say which keys a query may see; pass only one")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True = attend; it is {mask.dtype}")
    fits = mask.ndim == 4 and mask.shape[2:] == (queries, keys)
    if not (fits and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)):
        raise ValueError(
            f"mask {[*mask.shape]} does not fit [{batch} or 1, {heads} or 1, {queries}, {keys}]"
        )


def chunks(
    query: Tensor,
    key: Tensor,
    chosen: Normalizer,
    given: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    size: int = CHUNK_SCORES,
) -> Iterator[Chunk]:
    """Yield the scores [B, Hq, queries, keys], capped and with slopes but not masked, of some
    queries at a time (about ``size`` scores), and which keys these queries may see. ``given``:
    parameters of the normalizer ``chosen``; settings as in :func:`attention`."""
    slopes = given.get(SLOPES.name) if SLOPES in chosen.parameters else None
    batch, heads, queries, _ = query.shape
    key_count = key.shape[2]
    # BLAS rounds by layout: keys from a cache are contiguous, others are views.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = (upcast(query) * scale).contiguous()
    key = upcast(key).contiguous().transpose(2, 3)
    shift = key_count - queries
    step = max(1, min(queries, size // max(1, batch * heads * key_count)))
    if causal or window:
        # Narrow chunks leave out most of the keys that none of their queries sees.
        step = max(step, 16)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = max(0, start + shift - window + 1) if window else 0
        last = max(first + 1, min(key_count, stop + shift)) if causal else key_count
        keys = slice(first, last)
        allowed = None if mask is None else mask[:, :, start:stop, keys]
        if causal or window or slopes is not None:
            q_pos = torch.arange(start + shift, stop + shift, device=query.device)[:, None]
            other = torch.arange(first, last, device=query.device)
        if causal or window:
            band = other <= q_pos if causal else torch.ones_like(other <= q_pos)
            if window:
                band = band & (other > q_pos - window)
            allowed = band if allowed is None else allowed & band
        scores = grouped_matmul(query[:, :, start:stop], key[..., keys])
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        if slopes is not None:
            scores = scores - slopes.to(scores.dtype)[:, None, None] * (q_pos - other)
        yield Chunk(scores, allowed, keys)


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return [B, Hq, T, N] @ [B, Hkv, N, D] without repeating the shared heads of ``right``."""
    batch, heads, rows, _ = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    grouped = left.reshape(batch, kv_heads, heads // kv_heads * rows, left.shape[3])
    return (grouped @ right).view(batch, heads, rows, right.shape[3])


def upcast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def sequences(seq_bounds: Tensor) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the indices in [B, H, T, D] of each sequence's queries and keys, if any."""
    for row, first_query, last_query, first_key, last_key, _ in seq_bounds.tolist():
        if first_query < last_query and first_key < last_key:
            heads = (slice(row, row + 1), slice(None))
            yield (*heads, slice(first_query, last_query)), (*heads, slice(first_key, last_key))
