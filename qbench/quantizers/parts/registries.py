"""Parts by name, and ready combinations of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbench.quantizers.names import Presets
from qbench.registry import Registry

ACTIVATIONS = Presets("activation quantizer")
KV_CACHES = Presets("KV cache quantizer")
OUTLIERS = Presets("outlier treatment")
HEADS = Presets("pruning of heads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A name for several parts, as a recipe would state them, and a line about it."""

    name: str
    parts: Mapping[str, Any]
    description: str


COMBINATIONS: Registry[Combination] = Registry("combination")


def register_combination(name: str, description: str, **parts: Any) -> None:
    """Give ``parts`` (``weights``, ``activations``, ``kv``, ``outliers``, ``prune_heads``) one
    name."""
    COMBINATIONS.add(name, Combination(name=name, parts=parts, description=description))
