"""Settings of weights that differ between layers: a map from patterns of names to quantizers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field

from qbench.errors import QuantizationError, RecipeError, some
from qbench.quantizers.config import Shapes, WeightSettings, matching, name_parts, pattern, settings
from qbench.quantizers.registry import config_of, register
from qbench.records import UNQUANTIZED_BITS

ENDS = re.compile(r"(^|\.)((lm_)?head|embed_out|wte|\w*embed_(tokens|in)|word_embeddings)$")
WRITE = "{pattern: quantizer}, such as {'*.down_proj': gptq-8bit, '*': gptq-4bit}"


def _layers(value: Any) -> tuple[tuple[str, WeightSettings], ...]:
    """Return (pattern, settings) pairs of a recipe's mapping, or of a list of texts
    ``pattern=quantizer``. Settings that are given instead of a quantizer stay as they are."""
    if isinstance(value, Mapping):
        value = list(value.items())
    pairs = []
    for item in value if isinstance(value, list | tuple) else [value]:
        names, chosen = item.partition("=")[::2] if isinstance(item, str) else item
        if not isinstance(chosen, WeightSettings):
            try:
                config = config_of(chosen)
            except RecipeError as error:
                raise ValueError(f"{WRITE} ({names}: {error})") from None
            if config.weights is None or config.beside_weights or config.weights.prequantized:
                raise ValueError(
                    f"{WRITE}, with quantizers that qbench itself applies to weights alone (see "
                    f"{names})"
                )
            chosen = config.weights
        try:
            pairs.append((pattern(names), chosen))
        except ValueError as error:
            raise ValueError(f"{WRITE}, each key {error} (see {names})") from None
    return tuple(pairs)


@register("mixed", "weights whose settings differ between layers")
@settings
class Mixed(WeightSettings):
    """Gives each linear layer the settings of the first pattern that matches its name. LM head and
    embeddings are quantized if a pattern is their full name; a shared matrix has the LM head's.
    GPTQ calibrates with the layers of other methods unquantized. ``num_bits`` is the most that a
    layer has; records state the bits per weight that are stored."""

    method: ClassVar[str] = "mixed"
    title: ClassVar[str] = "Mixed weights"

    layers: Annotated[Any, BeforeValidator(_layers)] = Field(
        (), description="a quantizer of weights by pattern of layers' names; the first that "
        "matches counts: {'*.down_proj': gptq-8bit, '*': gptq-4bit}",
    )  # fmt: skip
    scheme = property(lambda self: "; ".join(f"{n}: {each.scheme}" for n, each in self.layers))
    needs_calibration = property(lambda self: any(s.needs_calibration for _, s in self.layers))
    batch_invariant = property(lambda self: all(s.batch_invariant for _, s in self.layers))

    def for_layer(self, name: str) -> WeightSettings | None:
        """Return the settings of the first pattern that matches the layer ``name``, or None."""
        for names, chosen in self.layers:
            if matching([name], (names,)):
                return replace(chosen, compute_dtype=self.compute_dtype)
        return None

    @property
    def end_names(self) -> tuple[str, ...]:
        """Return the patterns that are full names: only these can name LM head and embeddings."""
        return tuple(names for names, _ in self.layers if not set(names) & set("*?["))

    def by_settings(self, shapes: Shapes) -> list[tuple[str, WeightSettings, Shapes]]:
        """Return each pattern with its settings and the ``shapes`` of its layers, which may be
        none. Raises QuantizationError for layers that no pattern matches."""
        left, parts = dict(self.quantized(shapes)), []
        for names, chosen in self.layers:
            mine = {name: left.pop(name) for name in matching(list(left), (names,))}
            parts.append((names, chosen, mine))
        if left:
            raise QuantizationError(
                f"{self.name}: no pattern matches the layers {some(sorted(left))}; add a pattern "
                "'*', or list them under ignore"
            )
        return parts

    def fitted(self, shapes: Shapes) -> Self:
        """Return the mix with the settings of each pattern fitted to its layers."""
        parts = self.by_settings(shapes)
        # When planned, no shape of embeddings and LM head is known: their inputs are the layers'.
        fits = tuple((names, chosen.fitted(mine or shapes)) for names, chosen, mine in parts)
        return replace(self, layers=fits)

    def check_layers(self, shapes: Shapes) -> None:
        """Raise QuantizationError for a layer without a pattern, a pattern without a layer, and
        layers that do not fit their settings."""
        for names, chosen, mine in self.by_settings(shapes):
            if not mine:
                raise QuantizationError(
                    f"{self.name}: layers: {names!r} matches no linear layer that earlier patterns "
                    "leave (embeddings that share the LM head's matrix go by the LM head's name); "
                    f"{name_parts(shapes)}"
                )
            chosen.check_layers(mine)

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError without patterns, if the settings of one cannot run, or if they cannot
        quantize the LM head or embeddings that it names."""
        if not self.layers:
            raise RecipeError(f"{self.name}: layers: write {WRITE}")
        for names, chosen in self.layers:
            chosen.check(config, device)
            if ENDS.search(names) and not chosen.of_ends:
                raise RecipeError(f"{self.name}: layers: {names}: {chosen.name} cannot "
                                  "quantize LM head or embeddings; use rtn or hqq")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain JSON, with ``layers`` as pattern → settings."""
        layers = {names: chosen.to_dict() for names, chosen in self.layers}
        return {**super().to_dict(), "layers": layers}

    @property
    def num_bits(self) -> float:
        """Return the most bits that a pattern's settings have; 16 without patterns."""
        return max((chosen.num_bits for _, chosen in self.layers), default=UNQUANTIZED_BITS)

    @property
    def requirements(self) -> tuple[str, ...]:
        """Return the distributions that any pattern's settings require, each once."""
        named = [name for _, chosen in self.layers for name in chosen.requirements]
        return tuple(dict.fromkeys(named))

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the most bits per weight beside the code that the settings of a pattern take."""
        return max((chosen.shared_bits(rows, columns) for _, chosen in self.layers), default=0.0)
