"""What attention modules carry: rounding of keys and values, and which tokens it spares.

``qbench.attention.kv_cache`` says what it asks of them (its ``KVCache``); neither room imports the
other. On a GPU keys and values are rounded by kernels, elsewhere by the definition.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import QuantizationError
from qbench.quantizers.config import KVEvidence
from qbench.quantizers.kv_cache import rounding
from qbench.quantizers.kv_cache.rounding import Format
from qbench.quantizers.kv_cache.unrotated import Unrotated, carry

if TYPE_CHECKING:
    from qbench.quantizers.kv_cache.settings import KVCache

ATTRIBUTE = "qbench_kv_cache"  # where qbench.attention looks for it
OURS = "qbench-"  # attention functions that look


class AsTheyAre:
    """Keys and values that are kept as attention takes them."""

    def __init__(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value

    def ready(self, key: Tensor) -> Tensor:
        return key


class Cache(ABC):
    """Carried by all attention modules of a model. ``keep_first``, ``keep_recent``, ``key_group``:
    which tokens are read unquantized, see ``qbench.attention.kv_cache``. ``watch``: told what
    attention reads, for the audit."""

    def __init__(self, settings: KVCache) -> None:
        self.settings = settings
        self.keep_first = settings.keep_first
        self.keep_recent = settings.keep_recent
        self.key_group = settings.key_group
        self.format = Format(
            bits=settings.bits,
            floating=settings.format == "fp8",
            symmetric=settings.symmetric,
            scale_dtype=getattr(torch, settings.scale_dtype),
        )
        self.watch: Callable[[nn.Module, Any], None] | None = None
        self.paused = False  # everything is read as it is

    @property
    def evidence(self) -> KVEvidence:
        group = self.settings.channels(0)
        return KVEvidence(
            bits=self.format.bits,
            scale_bits=self.format.scale_bits,
            floating=self.format.floating,
            symmetric=self.format.symmetric,
            key_group=self.key_group,
            channels=group or None,
            whole_tensor=self.settings.scales == "tensor",
            keep_first=self.keep_first,
            keep_recent=self.keep_recent,
        )

    @property
    def uses_positions(self) -> bool:
        return self.keep_first > 0 or self.key_group > 1

    def as_kept(self, module: nn.Module, key: Tensor, value: Tensor) -> AsTheyAre | Unrotated:
        """From what a module hands over, keys and values as they are kept, before rounding."""
        kind = Unrotated if self.settings.before_rope else AsTheyAre
        return kind(module, key, value)

    @abstractmethod
    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] as they are read back once they are quantized.

        ``positions`` int32 [B or 1, T]: each token's index in its own sequence, negative for
        padding. Tokens that are never quantized come out as they are.
        """

    def spared(self, rounded: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
        """``rounded`` but for the first tokens, which are those of ``x``."""
        if not self.keep_first:
            return rounded
        assert positions is not None
        first = (positions < self.keep_first)[:, None, :, None]
        return torch.where(first, x, rounded)


class TokenCache(Cache):
    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if by_kernel(key):
            from qbench.quantizers.kv_cache import kernels

            apart = ((key, value),) if key.shape == value.shape else ((key,), (value,))
            coded = [
                x
                for parts in apart
                for x in kernels.by_token(
                    parts, self.format, self._channels(parts[0]), positions, self.keep_first
                )
            ]
            return coded[0], coded[1]
        return self._values(key, positions), self._values(value, positions)

    def _values(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return self.spared(rounding.by_token(x, self.format, self._channels(x)), x, positions)

    def _channels(self, x: Tensor) -> int:
        return self.settings.channels(x.shape[-1])


class ChannelCache(TokenCache):
    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert positions is not None
        first, group = self.keep_first, self.key_group
        if by_kernel(key):
            from qbench.quantizers.kv_cache import kernels

            coded = kernels.by_channel(key, self.format, positions, first, group)
            (values,) = kernels.by_token(
                (value,), self.format, self._channels(value), positions, first
            )
            return coded, values
        coded = rounding.by_channel(key, self.format, positions, first, group)
        return coded, self._values(value, positions)


class TensorCache(Cache):
    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        first = self.keep_first
        coded = (rounding.by_tensor(x, self.format, positions, first) for x in (key, value))
        coded_key, coded_value = coded
        return self.spared(coded_key, key, positions), self.spared(coded_value, value, positions)


def by_kernel(x: Tensor) -> bool:
    """Whether the kernels round it: on a GPU, or anywhere where Triton interprets them."""
    if importlib.util.find_spec("triton") is None:
        return False
    return x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def install(model: PreTrainedModel, settings: KVCache) -> None:
    """Let every attention module of ``model`` carry the cache that ``settings`` describe.

    Raises QuantizationError where the model's attention is not ours, which would not look, or has
    no keys and values of the usual kind.
    """
    attention = model.config._attn_implementation
    if not str(attention).startswith(OURS):
        raise QuantizationError(
            f"kv: {settings.name}: the model attends by {attention!r}, and only attention of "
            "qbench reads a quantized cache; take a normalizer of qbench, such as softmax"
        )
    modules = attention_modules(model)
    if not modules:
        raise QuantizationError(f"kv: {settings.name}: {type(model).__name__} has no attention")
    cache = settings.cache()
    for name, module in modules.items():
        setattr(module, ATTRIBUTE, cache)
        if settings.before_rope:
            carry(module, name)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep keys and values for later queries, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) and hasattr(module, "layer_idx")
    }


def evidence(model: nn.Module) -> Mapping[str, KVEvidence]:
    """What quantizes the cache of each attention module that carries one."""
    found = {}
    for name, module in model.named_modules():
        cache = getattr(module, ATTRIBUTE, None)
        if cache is not None:
            found[name] = cache.evidence
    return found
