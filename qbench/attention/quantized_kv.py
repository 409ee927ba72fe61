"""Attention over keys and values that a quantized KV cache would hold at each query's step.

An attention module whose model has a quantized cache carries a :class:`QuantizedKVCache` as its
attribute :data:`KV_CACHE`. Keys and values of whole sequences come in unquantized, also while text
is generated: transformers' cache keeps them so, and each query reads the quantized view. A token is
quantized when it is written, except

- the first ``sink_tokens`` tokens of a sequence, never;
- the last ``residual_length`` tokens up to and with the query's own: once they are older;
- keys whose scale is shared by ``key_group`` tokens: once the group is full and older.

So the query at position i of its sequence reads token j quantized if
sink_tokens ≤ j < sink_tokens + ⌊max(0, i + 1 − residual_length − sink_tokens) / group⌋ · group.
If this depends on i, attention takes keys and values from two sources (:func:`attention`).
Otherwise quantized keys and values replace the others, and any attention runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qbench.attention import reference
from qbench.attention.kernels.varlen import token_bounds
from qbench.attention.masks import Mask
from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import UnavailableError

KV_CACHE = "qbench_kv_cache"  # attribute of attention modules
READ = "qbench_kv_cache_read"  # option of attention functions: keys and values were read already
# A treated model's attention modules carry under ROTATION what turns queries and keys [..., D] into
# another basis: their products stay what they were, and what a cache of few bits rounds has no
# channel that outgrows the others. ROTATED is the option that says it has been applied.
ROTATION, ROTATED = "qbench_rotation", "qbench_rotated"


class KVPair(NamedTuple):
    """Keys and values [B, Hkv, Tk, D] before and after the cache rounds them."""

    key: Tensor
    value: Tensor
    quantized_key: Tensor
    quantized_value: Tensor


class KVTrace(NamedTuple):
    """Keys and values of one attention call, and each key's position [B or 1, Tk]."""

    pair: KVPair
    positions: Tensor


class QuantizedKVCache(ABC):
    """Base class of a KV cache of few bits, carried by an attention module.

    ``sink_tokens``, ``residual_length`` and ``key_group`` say which tokens are read unquantized,
    see the module's docstring; values are quantized token by token. ``one_scale``: all keys of a
    call share a scale, and all values. ``watch``, if set, is called with each call's trace.
    """

    sink_tokens: int = 0
    residual_length: int = 0
    key_group: int = 1
    one_scale: bool = False
    watch: Callable[[nn.Module, KVTrace], None] | None = None

    @abstractmethod
    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, D] as they are read back once they are quantized.

        ``positions`` int32 [B or 1, T]: each token's index in its own sequence, negative for
        padding. Tokens that are never quantized are returned unchanged.
        """


def rotate(
    module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return ``query`` and ``key`` rotated, if ``module`` rotates them and ``options`` do not say
    that it was done; then ``options`` say so."""
    rotation = getattr(module, ROTATION, None)
    if rotation is None or options.get(ROTATED):
        return query, key
    options[ROTATED] = True
    return rotation(query), rotation(key)


def needs_sequences(model: nn.Module) -> bool:
    """Return whether the attention of ``model`` must know where sequences begin, which a 4-D mask
    does not show."""
    return any(map(_needs_positions, _caches(model)))


def one_scale(model: nn.Module) -> bool:
    """Return whether a cache of ``model`` has one scale for all sequences of a forward pass and
    their padding."""
    return any(cache.one_scale for cache in _caches(model))


def _caches(model: nn.Module) -> Iterator[QuantizedKVCache]:
    caches = (getattr(module, KV_CACHE, None) for module in model.modules())
    return (cache for cache in caches if cache is not None)


def _needs_positions(cache: QuantizedKVCache) -> bool:
    return cache.sink_tokens > 0 or by_query(cache)


def by_query(cache: QuantizedKVCache) -> bool:
    """Return whether some queries read a token unquantized that later queries read quantized."""
    return cache.residual_length > 0 or cache.key_group > 1


def bound(cache: QuantizedKVCache, position: Tensor, group: int) -> Tensor:
    """Return the first position after ``sink_tokens`` that queries at ``position`` read
    unquantized, if ``group`` tokens are quantized together."""
    older = (position + 1 - cache.residual_length - cache.sink_tokens).clamp(min=0)
    return cache.sink_tokens + older // group * group


def read(
    cache: QuantizedKVCache,
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    *,
    queries: int = 0,
    mask: Mask | Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[KVPair, Tensor | None]:
    """Return ``key`` and ``value`` [B, Hkv, Tk, D] before and after rounding, and each key's
    position [B or 1, Tk] if positions are needed.

    Raises UnavailableError if it is unknown where sequences begin.
    """
    positions = None
    if _needs_positions(cache) or cache.watch is not None:
        positions = find_positions(key, queries, mask, position_ids, cu_seqlens_k)
    pair = KVPair(key, value, *cache.rounded(key, value, positions))
    if cache.watch is not None:
        assert positions is not None
        cache.watch(module, KVTrace(pair, positions))
    return pair, positions


def read_apart(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return keys and values rounded as all queries read them; None if that depends on positions,
    ``watch`` is set, or ``module`` has no quantized cache. The caller
    passes :data:`READ` to the attention function, so that they are not rounded twice."""
    cache = getattr(module, KV_CACHE, None)
    if cache is None or _needs_positions(cache) or cache.watch is not None:
        return None
    pair, _ = read(cache, module, key, value)
    return pair.quantized_key, pair.quantized_value


def find_positions(
    key: Tensor,
    queries: int,
    mask: Mask | Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """Return each key's index in its own sequence, int32 [B or 1, Tk]; negative for left padding.

    Raises UnavailableError for masks that do not say where sequences begin.
    """
    index = torch.arange(key.shape[2], device=key.device, dtype=torch.int32)[None]
    if cu_seqlens_k is not None:
        edges = cu_seqlens_k.to(torch.int32)
        sequence = torch.searchsorted(edges, index[0], right=True) - 1
        return index - edges[sequence][None]
    if mask is None:
        return index
    if isinstance(mask, Tensor):
        raise UnavailableError(
            "a KV cache with groups of tokens, sink_tokens or residual_length needs to know where "
            "each sequence begins, which a 4-D mask does not show; pass attention_mask [B, T]"
        )
    if mask.padding is not None:
        bounds = token_bounds(mask.padding.bool())
        if bounds is None:
            raise UnavailableError(
                "a KV cache with groups of tokens, sink_tokens or residual_length needs the tokens "
                "of a row side by side; this attention_mask has holes"
            )
        return index + mask.kv_offset - bounds[0][:, None]
    if position_ids is not None and queries == key.shape[2]:  # packed without cu_seqlens
        jumps = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
        starts = torch.where(jumps, index, 0).cummax(1).values
        return (index - starts).to(torch.int32)
    return index + mask.kv_offset


def attention(
    query: Tensor,
    pair: KVPair,
    *,
    cache: QuantizedKVCache,
    positions: Tensor,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    seq_bounds: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """``reference.attention`` where each query reads each key and value from its source.

    ``cache`` says which; ``positions`` [B or 1, Tk]: each key's in its own sequence; the last query
    stands at the last key's. Other arguments, result and errors as there.
    """
    chosen = NORMALIZERS.get(normalizer)
    key, value, quantized_key, quantized_value = pair
    reference.check(query, key, value, settings.get("mask"))
    if seq_bounds is not None:
        settings |= {"cache": cache, "normalizer": normalizer, "parameters": parameters}
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        for rows, keys in reference.sequences(seq_bounds):
            parts = KVPair(*(tensor[keys] for tensor in pair))
            output[rows] = attention(
                query[rows], parts, positions=positions[:, keys[2]], **settings
            )
        return output
    given = chosen.checked(parameters, query.shape[1])
    query_positions = positions[:, key.shape[2] - query.shape[2] :]
    values, quantized_values = (reference.upcast(v).contiguous() for v in (value, quantized_value))
    outputs, start = [], 0
    both = (
        reference.chunks(query, each, chosen, given, **settings) for each in (key, quantized_key)
    )
    for plain, quantized in zip(*both, strict=True):
        stop = start + plain.scores.shape[2]
        at, keys = query_positions[:, None, start:stop, None], positions[:, None, None, plain.keys]
        written = keys >= cache.sink_tokens
        of_key = written & (keys < bound(cache, at, cache.key_group))
        of_value = written & (keys < bound(cache, at, 1))
        weights = chosen.weights(
            torch.where(of_key, quantized.scores, plain.scores),
            allowed=plain.allowed, parameters=given,
        )  # fmt: skip
        plain_weights, quantized_weights = (
            weights.masked_fill(elsewhere, 0) for elsewhere in (of_value, ~of_value)
        )
        outputs.append(
            reference.grouped_matmul(plain_weights, values[:, :, plain.keys])
            + reference.grouped_matmul(quantized_weights, quantized_values[:, :, plain.keys])
        )
        start = stop
    return torch.cat(outputs, dim=2).to(query.dtype)
