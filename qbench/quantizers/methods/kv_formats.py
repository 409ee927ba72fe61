"""Settings of KV caches of few bits.

A scale is shared by a head's channels of one token (or a part of them), or by all keys, and all
values, of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import KVCacheSettings, settings
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.registry import register
from qbench.records import Part

LONGEST = 2**20  # tokens
Tokens = Annotated[int, Field(ge=0, le=LONGEST)]
BITS = (8, 4, 3, 2)
PER_TOKEN = "keys and values per head and token"
PER_TENSOR = "one scale per layer; scores depend on the batch"
WHOLE: dict[str, Any] = {"group_size": WHOLE_ROW}
FP8: dict[str, Any] = {"type": "float", "num_bits": 8}


@register("kv-fp8-tensor", f"fp8 cache, {PER_TENSOR}", scales="tensor", **FP8, **WHOLE)
@register(
    "kv-int{num_bits}-tensor", f"int{{num_bits}} cache, {PER_TENSOR}",
    num_bits=BITS, type="int", scales="tensor", **WHOLE,
)  # fmt: skip
@register("kv-fp8-token", f"fp8 cache, {PER_TOKEN}", scales="token", **FP8)
@register(
    "kv-int{num_bits}-token", f"int{{num_bits}} cache, {PER_TOKEN}",
    num_bits=BITS, type="int", scales="token",
)  # fmt: skip
@settings
class KVCache(KVCacheSettings):
    """Keys and values in few bits. Scales are dynamic: taken from the keys and values themselves.

    ``scales`` token: one per head and token, or per group of its channels. tensor: one for all keys
    of a layer in a forward pass and one for all values, which later tokens and the rest of the
    batch change.
    """

    backend: ClassVar[str] = "fake_quant"

    num_bits: Literal[8, 4, 3, 2]
    type: Literal["int", "float"] = "int"
    scales: Literal["token", "tensor"]
    group_size: Annotated[
        Annotated[int, Field(ge=2, le=65536)] | Literal[-1],
        Field(description="channels of a head that share a scale; -1 is the whole head"),
    ] = WHOLE_ROW
    sink_tokens: Annotated[
        Tokens, Field(description="tokens at the beginning of a sequence that stay unquantized")
    ] = 0

    @property
    def format(self) -> QuantFormat:
        in_groups = self.scales == "token" and self.group_size != WHOLE_ROW
        return QuantFormat(
            num_bits=self.num_bits,
            type=self.type,
            strategy="group" if in_groups else self.scales,
            group_size=self.group_size,
            scale_dtype="float16",
        )

    @property
    def shared(self) -> str:
        """Return in words which values share a scale."""
        if self.scales == "tensor":
            return "per tensor"
        return (
            "per head and token"
            if self.group_size == WHOLE_ROW
            else f"per token in groups of {self.group_size} channels"
        )

    @property
    def batch_invariant(self) -> bool:
        return not self.format.one_of_tensor

    @property
    def precision(self) -> Part:
        element = "fp8" if self.type == "float" else self.format.element
        words = [f"{element} {self.shared}{self.format.sides}"]
        if self.sink_tokens:
            words.append(f"first {self.sink_tokens} tokens unquantized")
        return Part(bits=self.num_bits, scheme=", ".join(words), simulated=True)

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Refuse latent-vector caches, groups that do not divide the head width, too many sink
        tokens."""
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
