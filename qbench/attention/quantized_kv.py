"""Keys and values as attention reads them from a KV cache of few bits, which attention modules
carry as their attribute :data:`KV_CACHE`. transformers' cache keeps them unquantized, also while
text is generated, and each query reads them rounded, the first ``sink_tokens`` excepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from qbench.attention.kernels.varlen import token_bounds
from qbench.errors import UnavailableError

if TYPE_CHECKING:
    from qbench.attention.transformers import Mask
    from qbench.quantizers.fake_quant import KVFakeQuant

KV_CACHE = "qbench_kv_cache"  # attribute of attention modules
READ = "qbench_kv_cache_read"  # option of attention functions: keys and values were read already


class KVTrace(NamedTuple):
    """Keys and values [B, Hkv, Tk, D] of one attention call before and after rounding, and each
    key's position in its sequence [B or 1, Tk]."""

    key: Tensor
    value: Tensor
    quantized_key: Tensor
    quantized_value: Tensor
    positions: Tensor


def needs_sequences(model: nn.Module) -> bool:
    """Return whether attention must know where sequences begin, which a 4-D mask does not show."""
    return any(cache.sink_tokens > 0 for cache in _caches(model))


def one_scale(model: nn.Module) -> bool:
    """Return whether all sequences of a forward pass, padding included, share one scale."""
    return any(cache.one_scale for cache in _caches(model))


def _caches(model: nn.Module) -> Iterator[KVFakeQuant]:
    caches = (getattr(module, KV_CACHE, None) for module in model.modules())
    return (cache for cache in caches if cache is not None)


def read(
    cache: KVFakeQuant,
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    *,
    queries: int = 0,
    mask: Mask | Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``key`` and ``value`` [B, Hkv, Tk, D] as they are read from ``cache``. ``queries``:
    their number; what follows it is as transformers passes it to an attention function. Raises
    UnavailableError if it is unknown where sequences begin, and that matters."""
    positions = None
    if cache.sink_tokens or cache.watch is not None:
        positions = find_positions(key, queries, mask, position_ids, cu_seqlens_k)
    rounded = cache.rounded(key, positions), cache.rounded(value, positions)
    if cache.watch is not None:
        assert positions is not None
        cache.watch(module, KVTrace(key, value, *rounded, positions))
    return rounded


def read_apart(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return keys and values as they are read from the cache of ``module``; None if that depends on
    positions, if ``watch`` is set, or if ``module`` has no quantized cache. The caller passes
    :data:`READ` to the attention function, so that they are not rounded twice."""
    cache = getattr(module, KV_CACHE, None)
    if cache is None or cache.sink_tokens or cache.watch is not None:
        return None
    return read(cache, module, key, value)


def find_positions(
    key: Tensor,
    queries: int,
    mask: Mask | Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """Return each key's index in its own sequence, int32 [B or 1, Tk]; negative for left padding.
    Arguments as of :func:`read`. Raises UnavailableError for masks that do not say where sequences
    begin: a 4-D tensor, or padding inside a row."""
    index = torch.arange(key.shape[2], device=key.device, dtype=torch.int32)[None]
    if cu_seqlens_k is not None:
        edges = cu_seqlens_k.to(torch.int32)
        sequence = torch.searchsorted(edges, index[0], right=True) - 1
        return index - edges[sequence][None]
    if mask is None:
        return index
    if isinstance(mask, Tensor):
        raise UnavailableError(
            "a KV cache with sink_tokens needs to know where each sequence begins, which "
            "a 4-D mask does not show; pass attention_mask [B, T]"
        )
    if mask.padding is not None:
        bounds = token_bounds(mask.padding.bool())
        if bounds is None:
            raise UnavailableError(
                "a KV cache with sink_tokens needs the tokens of a row side by side, and this "
                "attention_mask has holes; pad at one end"
            )
        return index + mask.kv_offset - bounds[0][:, None]
    if position_ids is not None and queries == key.shape[2]:  # packed without cu_seqlens
        jumps = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
        starts = torch.where(jumps, index, 0).cummax(1).values
        return (index - starts).to(torch.int32)
    return index + mask.kv_offset
