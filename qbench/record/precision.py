"""What of a model is quantized, and to how many bits: weights, activations, KV cache."""

from __future__ import annotations

from pydantic import Field

from qbench.record.written import Written

UNQUANTIZED_BITS = 16


class Part(Written):
    """The format of one of the three.

    ``bits`` are those of one code, scales and zeros left out; ``scheme`` says the rest in the
    field's words, such as ``int4 in groups of 128`` or ``int8 per token``. ``simulated``: values
    are rounded to the format and computed with in a wider one; None where nothing is said of it.
    """

    bits: float = Field(gt=0, le=32)
    scheme: str
    simulated: bool | None = None


class Precision(Written):
    """The three parts of a cell's precision; None: not quantized. ``heads``: which attention heads
    were cut out, in words; a cell without them is held against the whole model as quantized ones
    are."""

    weights: Part | None = None
    activations: Part | None = None
    kv_cache: Part | None = None
    heads: str | None = None

    @property
    def quantized(self) -> bool:
        return not (self.weights is self.activations is self.kv_cache is self.heads is None)

    @property
    def in_parts(self) -> bool:
        """Whether activations or the KV cache are parts of their own: LLM.int8's activations
        belong to its weights."""
        activations = self.activations is not None and self.activations.simulated is not None
        return activations or self.kv_cache is not None

    @property
    def words(self) -> str:
        """``W4A8, simulated``: the name, and what multiplied quantized activations."""
        simulated = self.activations.simulated if self.activations else None
        return self.name + {None: "", True: ", simulated", False: ", real"}[simulated]

    @property
    def order(self) -> tuple[float, float, float]:
        """By which precisions are sorted: weights first."""
        parts = (self.weights, self.activations, self.kv_cache)
        weights, activations, kv_cache = (p.bits if p else UNQUANTIZED_BITS for p in parts)
        return weights, activations, kv_cache

    @property
    def name(self) -> str:
        """As the field writes it: ``W4A16``, ``W8A8``, ``W4A8KV4``; ``W16A16`` for none."""
        weights, activations = (
            f"{part.bits if part else UNQUANTIZED_BITS:g}"
            for part in (self.weights, self.activations)
        )
        kv_cache = f"KV{self.kv_cache.bits:g}" if self.kv_cache else ""
        return f"W{weights}A{activations}{kv_cache}{', heads pruned' if self.heads else ''}"
