"""Attention in plain PyTorch: the definition that every kernel is compared with.

Works in float64 for float64 inputs, else in float32 (the result is rounded once, to the
inputs' dtype). Queries are taken in chunks, so memory grows linearly with their number.

Two choices make every normalizer safe for any finite score:
m = max(0, row maximum), so that neither e^(x − m) nor e^(−m) overflows, and
e^(x − m) − e^(−m) = −e^(max(x, 0) − m) · expm1(−|x|) · sign(x), which does not cancel near 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qbench.attention.normalizers import EPSILON, NORMALIZERS

CHUNK_SCORES = 1 << 19  # scores held at once: 2 MiB in float32, what a core's cache holds
SAFE_MAXIMUM = 60.0  # e^60 · 1e10 is far from float32's largest number


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Attention of query [B, Hq, Tq, D] over key [B, Hkv, Tk, D] and value [B, Hkv, Tk, Dv].

    ``scale``: factor of the scores, 1/√D by default. ``mask``: bool, [B or 1, Hq or 1, Tq, Tk],
    True = attend. ``causal`` aligns the last query with the last key; ``window`` lets a query
    see that many keys up to and with its own. A query with nothing to attend to gives 0.
    Returns [B, Hq, Tq, Dv]. Raises RecipeError for an unknown normalizer, ValueError for shapes
    that do not fit.
    """
    NORMALIZERS.get(normalizer)
    check(query, key, value, mask)
    square = query.shape[2] == key.shape[2]
    last_only = query.shape[2] == 1  # sees every key, causal or not
    if normalizer == "softmax" and not window and query.dtype != torch.float64:
        if not causal or last_only:
            return _torch_softmax(query, key, value, _scale(query, scale), mask, False)
        if square and mask is None:
            return _torch_softmax(query, key, value, _scale(query, scale), None, True)
    values = _wide(value).contiguous()  # products round by layout, see _scores
    outputs = []
    for scores, allowed, keys in _scores(query, key, scale, mask, causal, window):
        if normalizer == "softpick" and not scores.requires_grad:
            above, total = _softpick_in_place(scores, allowed)
            outputs.append(_mix(above, values[:, :, keys]).div_(total))
        else:
            outputs.append(_mix(normalize(scores, normalizer, allowed), values[:, :, keys]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.to(query.dtype)


def weights(
    query: Tensor,
    key: Tensor,
    *,
    normalizer: str,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """The attention weights [B, Hq, Tq, Tk], in float32 (float64 for float64 inputs).

    Arguments and errors as in :func:`attention`. Memory grows with Tq · Tk.
    """
    NORMALIZERS.get(normalizer)
    check(query, key, key, mask)
    rows = []
    for scores, allowed, keys in _scores(query, key, scale, mask, causal, window):
        chunk = normalize(scores, normalizer, allowed)
        after = key.shape[2] - keys.stop
        rows.append(torch.nn.functional.pad(chunk, (keys.start, after)))
    return torch.cat(rows, dim=2)


def normalize(scores: Tensor, normalizer: str, allowed: Tensor | None = None) -> Tensor:
    """Weights of ``scores`` [..., N] over the last axis; where ``allowed`` is False a key counts
    neither above nor below the line. A row with nothing allowed gives zeros."""
    # The maximum only shifts the exponents: the function and its gradient do not depend on it.
    visible = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
    maximum = visible.detach().amax(-1, keepdim=True)
    if normalizer == "softmax":
        # A finite shift keeps rows without any key free of −∞ − (−∞).
        exponentials = (visible - maximum.clamp(min=torch.finfo(scores.dtype).min)).exp()
        return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=EPSILON)
    maximum = maximum.clamp(min=0)
    if normalizer == "rectified":
        kept = scores.masked_fill(~(visible >= 0), float("-inf"))
        exponentials = (kept - maximum).exp()
        # The largest exponential of a row with any is 1, so this clamp only makes 0 / 0 zero.
        return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=EPSILON)
    if normalizer == "softpick":
        distance = torch.expm1(-scores.abs()) * (scores.clamp(min=0) - maximum).exp()
        if allowed is not None:
            distance = distance.masked_fill(~allowed, 0.0)
        total = EPSILON - distance.sum(-1, keepdim=True)
        return torch.where(scores > 0, -distance, 0.0) / total
    raise NotImplementedError(f"no reference for the normalizer {normalizer!r}")


def check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raises ValueError where the shapes or the mask's dtype do not fit together."""
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
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True = attend; it is {mask.dtype}")
    fits = mask.ndim == 4 and all(
        have in (1, want) if axis < 2 else have == want
        for axis, (have, want) in enumerate(
            zip(mask.shape, (batch, heads, queries, keys), strict=True)
        )
    )
    if not fits:
        raise ValueError(
            f"mask {tuple(mask.shape)} does not fit; "
            f"[{batch} or 1, {heads} or 1, {queries}, {keys}] does"
        )


def _scores(
    query: Tensor,
    key: Tensor,
    scale: float | None,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
) -> Iterator[tuple[Tensor, Tensor | None, slice]]:
    """Scores of a chunk of queries over the keys that any of them may see, what each of them may
    see, and which keys these are."""
    batch, heads, queries, _ = query.shape
    key_count = key.shape[2]
    # BLAS rounds by layout: keys from a cache are contiguous, others are views.
    query = (_wide(query) * _scale(query, scale)).contiguous()
    key = _wide(key).contiguous().transpose(2, 3)
    shift = key_count - queries
    step = max(1, min(queries, CHUNK_SCORES // max(1, batch * heads * key_count)))
    if causal or window:
        # Narrow chunks leave out most of the keys that nobody in them may see.
        step = max(step, 16)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = max(0, start + shift - window + 1) if window else 0
        last = max(first + 1, min(key_count, stop + shift)) if causal else key_count
        keys = slice(first, last)
        allowed = None if mask is None else mask[:, :, start:stop, keys]
        if causal or window:
            own = torch.arange(start + shift, stop + shift, device=query.device)[:, None]
            other = torch.arange(first, last, device=query.device)
            band = other <= own if causal else torch.ones_like(other <= own)
            if window:
                band = band & (other > own - window)
            allowed = band if allowed is None else allowed & band
        yield _mix(query[:, :, start:stop], key[..., keys]), allowed, keys


def _softpick_in_place(scores: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """What stands above the line of equation (1), [..., N], and below it, [..., 1].

    ``scores`` is overwritten: without new memory and with one exponential a score, inference
    takes a third of the time of :func:`normalize`.
    """
    if allowed is not None:
        scores.mul_(allowed)  # e^0 − 1 = 0: a score of 0 adds nothing above or below the line
    maximum = scores.amax(-1, keepdim=True).clamp_(min=0)
    if maximum.max() <= SAFE_MAXIMUM:  # the shift by m is not needed: both lines times e^m
        above = scores.expm1_()
        both = above.sum(-1, keepdim=True)
        above.relu_()
        # Σ|a| = 2 Σ max(a, 0) − Σ a: two sums are thrice as fast as a norm, and nothing cancels
        total = above.sum(-1, keepdim=True).mul_(2).sub_(both)
        return above, total.add_(maximum.exp_().mul_(EPSILON))
    signs = scores.sign()
    distance = (scores.clamp(min=0) - maximum).exp_().mul_(scores.abs_().neg_().expm1_().neg_())
    total = distance.sum(-1, keepdim=True).add_(EPSILON)
    return distance.mul_(signs).relu_(), total


def _mix(left: Tensor, right: Tensor) -> Tensor:
    """[B, Hq, T, N] @ [B, Hkv, N, D] without repeating the shared heads of ``right``."""
    batch, heads, rows, _ = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    grouped = left.reshape(batch, kv_heads, heads // kv_heads * rows, left.shape[3])
    return (grouped @ right).view(batch, heads, rows, right.shape[3])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _torch_softmax(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Torch's own softmax attention in float32: the same function, without storing the scores."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query.float(),
        key.float(),
        value.float(),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if mask is not None:
        # Torch averages all values, or gives NaN, where a query has nothing to attend to.
        output = output.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return output.to(query.dtype)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    starts_q: Tensor,
    starts_k: Tensor,
) -> Tensor:
    """:func:`attention` of sequences laid in a row in [1, H, T, D], none of which sees another.

    Sequence s has the queries ``starts_q[s]`` to ``starts_q[s + 1]``, and so its keys; both are
    integer tensors [S + 1]. Queries outside every sequence give 0.
    """
    output = value.new_zeros(*query.shape[:3], value.shape[3])
    edges_q, edges_k = starts_q.tolist(), starts_k.tolist()
    for s in range(len(edges_q) - 1):
        rows, keys = slice(*edges_q[s : s + 2]), slice(*edges_k[s : s + 2])
        if rows.start < rows.stop and keys.start < keys.stop:
            output[:, :, rows] = attention(
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                normalizer=normalizer,
                scale=scale,
                causal=causal,
                window=window,
            )
    return output
