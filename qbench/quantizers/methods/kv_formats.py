"""Settings of KV caches of few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import Settings, settings
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat, number
from qbench.quantizers.registry import register
from qbench.records import Part, Precision

ELEMENTS = ("int8", "int4", "int3", "int2", "fp8")


@register(
    "kv-{element}-tensor", "{element} cache, one scale per layer; scores depend on the batch",
    element=ELEMENTS, scales="tensor", group_size=WHOLE_ROW,
)  # fmt: skip
@register(
    "kv-{element}-token", "{element} cache, keys and values per head and token",
    element=ELEMENTS, scales="token",
)  # fmt: skip
@settings
class KVCache(Settings):
    """Keys and values that attention reads, in few bits. Scales are dynamic. ``scales`` token: one
    per head and token, or per group of its channels; tensor: one for all keys of a layer in a
    forward pass and one for all values, which later tokens and the rest of the batch change."""

    kind: ClassVar = "kv_cache"
    method: ClassVar[str] = "kv"
    title: ClassVar[str] = "KV cache"
    backend: ClassVar[str] = "fake_quant"

    element: str
    scales: Literal["token", "tensor"]
    group_size: Annotated[int, Field(ge=2, le=65536)] | Literal[-1] = Field(
        WHOLE_ROW, description="channels of a head that share a scale; -1 is the whole head"
    )
    sink_tokens: int = Field(
        0, ge=0, le=2**20,
        description="tokens at the beginning of a sequence that stay unquantized",
    )  # fmt: skip
    batch_invariant = property(lambda self: not self.format.one_of_tensor)

    @property
    def format(self) -> QuantFormat:
        """Return the number format to which keys and values are rounded."""
        return QuantFormat(
            **number(self.element),
            strategy=self.scales if self.group_size == WHOLE_ROW else "group",
            group_size=self.group_size,
            scale_dtype="float16",
        )

    @property
    def precision(self) -> Precision:
        """Return bits and scheme of keys and values, such as ``int4 per token in groups of 32
        channels``."""
        shared = "per tensor" if self.scales == "tensor" else "per head and token"
        if self.group_size != WHOLE_ROW:
            shared = f"per token in groups of {self.group_size} channels"
        sinks = f", first {self.sink_tokens} tokens unquantized" if self.sink_tokens else ""
        scheme = f"{self.element} {shared}{self.format.sides}{sinks}"
        return Precision(kv_cache=Part(bits=self.format.num_bits, scheme=scheme, simulated=True))

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError for caches of latent vectors, for groups that do not divide the head's
        width, and for as many sink tokens as the context has."""
        if config.get("kv_lora_rank"):
            raise RecipeError(
                f"kv_cache: {self.name}: this model's cache holds latent vectors instead of keys "
                "and values (multi-head latent attention), which no KV quantizer here takes; leave "
                "kv_cache out"
            )
        width, group = head_dim(config), self.group_size
        if width is not None and group != WHOLE_ROW and width % group:
            raise RecipeError(
                f"kv_cache: {self.name}: group_size {group} does not divide this checkpoint's head "
                f"width {width}; take one that does"
            )
        context = context_length(config)
        if context is not None and self.sink_tokens >= context:
            raise RecipeError(
                f"kv_cache: {self.name}: sink_tokens {self.sink_tokens} leave no token of this "
                f"checkpoint's context of {context} to quantize; make them fewer"
            )


def head_dim(config: Mapping[str, Any]) -> int | None:
    """Return a head's width by a checkpoint's configuration; None if it states none."""
    config = config.get("text_config") or config
    width = config.get("hidden_size") or config.get("n_embd") or config.get("d_model")
    heads = config.get("num_attention_heads") or config.get("num_heads") or config.get("n_head")
    one_width = isinstance(width, int) and isinstance(heads, int)  # else a list, by layer
    return config.get("head_dim") or (width // heads if one_width else None)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the longest context in tokens that a configuration states; None if it states none."""
    config = config.get("text_config") or config
    return config.get("max_position_embeddings") or config.get("n_positions")
