"""Round keys and values to few bits as an attention module reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.attention.quantized_kv import KV_CACHE, QuantizedKVCache
from qbench.quantizers.fake_quant import fake_quantize, scale_of_tensor

if TYPE_CHECKING:
    from qbench.quantizers.methods.kv_formats import KVCache


class KVFakeQuant(QuantizedKVCache):
    """Fake-quantize keys and values by the format of ``settings``."""

    def __init__(self, settings: KVCache) -> None:
        self.sink_tokens = settings.sink_tokens
        self.residual_length = settings.residual_length
        self.key_group = settings.key_group
        self.format = settings.format
        self.one_scale = settings.format.one_of_tensor

    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        by_channel = self.format.strategy == "channel"
        keys = self._channels(key, positions) if by_channel else self._tokens(key, positions)
        return keys, self._tokens(value, positions)

    def _tokens(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x.transpose(1, 2)  # [B, T, H, D], as they lie: no copy
        first, fixed = None, None
        if self.sink_tokens:
            first = (positions < self.sink_tokens)[:, :, None, None]
        if self.format.one_of_tensor:
            fixed = scale_of_tensor(*_range(x, first), self.format)
        rounded = fake_quantize(x, self.format, fixed)
        return (rounded if first is None else torch.where(first, x, rounded)).transpose(1, 2)

    def _channels(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Round complete groups of tokens; return other tokens unchanged."""
        x = x.transpose(1, 2)
        expanded = positions.expand(len(x), -1)
        rows, tokens = whole_groups(expanded, self.sink_tokens, self.key_group)
        groups = x[rows, tokens].movedim(1, -1)  # [groups, H, D, tokens]
        result = x.clone()
        result[rows, tokens] = fake_quantize(groups, self.format).movedim(-1, 1)
        return result.transpose(1, 2)


def _range(x: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of ``x`` where ``left_out`` is False; 0 if it is
    True everywhere."""
    if left_out is None:
        return torch.aminmax(x)
    low = x.masked_fill(left_out, torch.inf).amin()
    high = x.masked_fill(left_out, -torch.inf).amax()
    nothing = left_out.all()
    return low.masked_fill(nothing, 0.0), high.masked_fill(nothing, 0.0)


def whole_groups(positions: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return rows [n, 1] and tokens [n, size] of the complete groups of ``size`` adjacent tokens,
    counted in each sequence from position ``first``. ``positions`` [B, T]: each token's index in
    its sequence."""
    last = positions[:, size - 1 :]
    begin = positions[:, : last.shape[1]]
    full = (begin >= first) & ((begin - first) % size == 0) & (last == begin + size - 1)
    rows, tokens = full.nonzero(as_tuple=True)
    return rows[:, None], tokens[:, None] + torch.arange(size, device=tokens.device)


def install(model: PreTrainedModel, settings: KVCache, tensors: Mapping[str, Tensor]) -> None:
    """Set the cache that ``settings`` describe on every attention module of ``model``."""
    cache = KVFakeQuant(settings)
    for module in attention_modules(model).values():
        setattr(module, KV_CACHE, cache)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep keys and values for later queries, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) and hasattr(module, "layer_idx")
    }


def evidence(model: nn.Module, settings: KVCache) -> dict[str, KVFakeQuant]:
    """Return the cache of each attention module that has one, by module's name."""
    return {
        name: getattr(module, KV_CACHE)
        for name, module in model.named_modules()
        if getattr(module, KV_CACHE, None) is not None
    }
