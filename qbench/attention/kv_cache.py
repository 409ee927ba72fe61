"""Attention over keys and values that a quantized KV cache would hold at each query's step.

An attention module whose model has a quantized cache carries it under :data:`KV_CACHE`, as a
:class:`KVCache`. Keys and values of whole sequences come in unquantized, also where text is
generated: transformers' cache keeps them so, and each query reads the quantized view. A token is
quantized when it is written, except

- the first ``keep_first`` tokens of a sequence, never;
- the last ``keep_recent`` tokens up to and with the query's own: once they are older;
- keys whose scale is shared by ``key_group`` tokens: once the group is full and older.

So the query at position i of its sequence reads token j quantized where
keep_first ≤ j < keep_first + ⌊max(0, i + 1 − keep_recent − keep_first) / group⌋ · group. Where this
depends on i, attention takes keys and values from two sources (:mod:`.two_sources`). Where it does
not, quantized keys and values replace the others and any attention runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qbench.attention.masks import Mask
from qbench.errors import UnavailableError

KV_CACHE = "qbench_kv_cache"  # attribute of attention modules
READ = "qbench_kv_cache_read"  # option of attention functions: keys and values were read already


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Which tokens are read unquantized, see the module's docstring. Values are always quantized
    token by token."""

    keep_first: int = 0
    keep_recent: int = 0
    key_group: int = 1

    @property
    def by_query(self) -> bool:
        """Whether a token is read unquantized by some queries and quantized by later ones."""
        return self.keep_recent > 0 or self.key_group > 1

    def bound(self, position: Tensor, group: int) -> Tensor:
        """The first position after ``keep_first`` that queries at ``position`` read unquantized,
        where ``group`` tokens are quantized together."""
        older = (position + 1 - self.keep_recent - self.keep_first).clamp(min=0)
        return self.keep_first + older // group * group


class Sources(NamedTuple):
    """Keys and values [B, Hkv, Tk, D] as they are, and as they are read back from the cache."""

    key: Tensor
    value: Tensor
    coded_key: Tensor
    coded_value: Tensor


class Consumed(NamedTuple):
    """What attention reads in one call: ``sources``, the keys before their rotation where those
    are what is quantized (else those of ``sources``), and each key's position [B or 1, Tk]."""

    sources: Sources
    key: Tensor
    coded_key: Tensor
    positions: Tensor


class Kept(Protocol):
    """``key`` and ``value`` [B, Hkv, T, D] as a cache keeps them; ``ready`` makes such keys what
    queries are multiplied with: it rotates them, where the cache keeps them before RoPE."""

    key: Tensor
    value: Tensor

    def ready(self, key: Tensor) -> Tensor: ...


class KVCache(Protocol):
    """What an attention module carries. ``uses_positions``: whether rounding asks where in its
    sequence a token stands. ``watch``, if it is set, is told what attention reads. ``paused``:
    everything is read as it is."""

    keep_first: int
    keep_recent: int
    key_group: int
    uses_positions: bool
    paused: bool
    watch: Callable[[nn.Module, Consumed], None] | None

    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] as they are read back once they are quantized.
        ``positions`` int32 [B or 1, T]: each token's index in its own sequence, negative for
        padding. Tokens that are never quantized come out as they are."""

    def as_kept(self, module: nn.Module, key: Tensor, value: Tensor) -> Kept:
        """From what a module hands over, keys and values as the cache keeps them, before they are
        rounded."""


def needs_sequences(model: nn.Module) -> bool:
    """Whether the attention of ``model`` must know where its sequences begin: then a mask alone
    does not say enough."""
    caches = (getattr(module, KV_CACHE, None) for module in model.modules())
    return any(cache is not None and _needs_positions(cache) for cache in caches)


def _needs_positions(cache: KVCache) -> bool:
    return cache.uses_positions or residual(cache).by_query


def residual(cache: KVCache) -> Residual:
    return Residual(
        keep_first=cache.keep_first, keep_recent=cache.keep_recent, key_group=cache.key_group
    )


def read(
    cache: KVCache,
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    *,
    queries: int,
    mask: Mask | Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Sources, Tensor | None]:
    """What attention reads of what a module hands over as ``key`` and ``value`` [B, Hkv, Tk, D],
    and each key's position where those are needed.

    Raises UnavailableError where it cannot be told where sequences begin.
    """
    positions = None
    if _needs_positions(cache) or cache.watch is not None:
        positions = find_positions(key, queries, mask, position_ids, cu_seqlens_k)
    kept = cache.as_kept(module, key, value)
    if cache.paused:
        return Sources(key, kept.value, key, kept.value), positions
    coded, coded_value = cache.rounded(kept.key, kept.value, positions)
    sources = Sources(key, kept.value, kept.ready(coded), coded_value)
    if cache.watch is not None:
        assert positions is not None
        cache.watch(module, Consumed(sources, kept.key, coded, positions))
    return sources, positions


def read_apart(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Keys and values as all queries read them, where that does not depend on where they stand in
    a sequence; None where it does, or where ``module`` has no quantized cache. For who attends
    with :data:`READ`, since rounding twice is not rounding once."""
    cache = getattr(module, KV_CACHE, None)
    if cache is None or _needs_positions(cache) or cache.watch is not None:
        return None
    kept = cache.as_kept(module, key, value)
    if cache.paused:
        return key, kept.value
    coded, coded_value = cache.rounded(kept.key, kept.value, None)
    return kept.ready(coded), coded_value


def find_positions(
    key: Tensor,
    queries: int,
    mask: Mask | Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """Each key's index in its own sequence, int32 [B or 1, Tk]; negative for padding on the left.

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
            "a KV cache with groups of tokens, keep_first or keep_recent needs to know where each "
            "sequence begins, and a 4-D mask does not say; pass attention_mask [B, T]"
        )
    if mask.padding is not None:
        tokens = mask.padding.bool()
        first = tokens.to(torch.int8).argmax(1)
        span = torch.arange(tokens.shape[1], device=tokens.device)
        inside = (span >= first[:, None]) & (span < (first + tokens.sum(1))[:, None])
        if not torch.equal(inside, tokens):
            raise UnavailableError(
                "a KV cache with groups of tokens, keep_first or keep_recent needs the tokens of a "
                "row side by side; this attention_mask has holes"
            )
        return index + (mask.kv_offset - first[:, None]).to(torch.int32)
    if position_ids is not None and queries == key.shape[2]:  # packed without cu_seqlens
        jumps = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
        starts = torch.where(jumps, index, 0).cummax(1).values
        return (index - starts).to(torch.int32)
    return index + mask.kv_offset
