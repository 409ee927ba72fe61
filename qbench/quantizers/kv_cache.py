"""KV caches of few bits: the settings, and what can be asked of them. Imports no torch.

A scale is shared by a head's channels of one token (or a part of them), by a channel over some
tokens (KIVI, Liu et al. 2024), or by all keys, and all values, of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.errors import RecipeError
from qbench.quantizers.config import SETTINGS, KVCacheSettings
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.names import KV_CACHES
from qbench.records import Part

LONGEST = 2**20  # tokens
Tokens = Annotated[int, Field(ge=0, le=LONGEST)]
Symmetric = Annotated[
    bool,
    Field(
        description="2^(bits−1)−1 levels on each side of zero; false: 2^bits levels from the "
        "lowest to the highest value, which is stored too"
    ),
]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class KVCache(KVCacheSettings):
    """A scale for each head and token, or several, or one for all keys of a layer in a forward pass
    and one for all values: then later tokens and the rest of the batch change it, which is
    declared. Scales are dynamic: taken from the keys and values themselves."""

    backend: ClassVar[str] = "kv_fake_quant"

    num_bits: Literal[8, 4, 3, 2]
    type: Literal["int", "float"] = "int"
    symmetric: Symmetric = True
    sink_tokens: Annotated[
        Tokens, Field(description="tokens at the beginning of a sequence that stay unquantized")
    ] = 0
    residual_length: Annotated[
        Tokens,
        Field(description="latest tokens, with the query's own, that are not quantized yet"),
    ] = 0
    scale_dtype: Annotated[
        Literal["float16", "float32"],
        Field(description="what scales and lowest values are stored in"),
    ] = "float16"

    scales: Literal["token", "channel", "tensor"] = "token"
    group_size: Annotated[
        Annotated[int, Field(ge=2, le=65536)] | Literal[-1],
        Field(description="channels of a head that share a scale; -1 is the whole head"),
    ] = WHOLE_ROW

    @property
    def batch_invariant(self) -> bool:
        return self.scales != "tensor"

    @property
    def element(self) -> str:
        return "fp8" if self.type == "float" else f"int{self.num_bits}"

    @property
    def name(self) -> str:
        return f"{self.element}-{self.scales}"

    @property
    def format(self) -> QuantFormat:
        in_groups = self.scales == "token" and self.group_size != WHOLE_ROW
        return QuantFormat(
            num_bits=self.num_bits,
            type=self.type,
            symmetric=self.symmetric,
            strategy="group" if in_groups else self.scales,
            group_size=self.group_size,
            scale_dtype=self.scale_dtype,
            zero_point="float",
        )

    @property
    def key_group(self) -> int:
        """Tokens whose keys share a scale in each channel, and so are quantized together."""
        return self.format.group_size if self.scales == "channel" else 1

    @property
    def two_sources(self) -> bool:
        """Whether some queries read a token unquantized that later queries read quantized."""
        return self.residual_length > 0 or self.key_group > 1

    @property
    def precision(self) -> Part:
        size = self.group_size
        shared = {
            "channel": f"keys per channel in groups of {size} tokens, values per token of {size} "
            "channels",
            "token": "per head and token"
            if size == WHOLE_ROW
            else f"per token in groups of {size} channels",
            "tensor": "per tensor",
        }[self.scales]
        words = [f"{self.element} {shared}"]
        if not self.symmetric:
            words.append("asymmetric")
        if self.sink_tokens:
            words.append(f"first {self.sink_tokens} tokens unquantized")
        if self.residual_length:
            words.append(f"last {self.residual_length} tokens unquantized")
        return Part(bits=self.num_bits, scheme=", ".join(words), simulated=True)

    def check(self, config: Mapping[str, Any], device: str) -> None:
        if config.get("kv_lora_rank"):
            raise RecipeError(
                f"kv: {self.name}: this model's cache holds latent vectors instead of keys and "
                "values (multi-head latent attention), which no KV quantizer here takes; leave kv "
                "out"
            )
        width, group = head_dim(config), self.group_size
        if width is not None and group != WHOLE_ROW and width % group:
            raise RecipeError(
                f"kv: {self.name}: group_size {group} does not divide this checkpoint's head width "
                f"{width}; take one that does"
            )
        context = context_length(config)
        needed = self.sink_tokens + self.residual_length + self.key_group
        if context is not None and needed > context:
            raise RecipeError(
                f"kv: {self.name}: sink_tokens {self.sink_tokens}, residual_length "
                f"{self.residual_length} and groups of {self.key_group} leave no token of this "
                f"checkpoint's context of {context} to quantize; make them smaller"
            )
        if self.key_group > 1 and config.get("sliding_window") and _windows(config):
            raise RecipeError(
                f"kv: {self.name}: a sliding window drops tokens from the middle of a group, whose "
                f"scale is then unknown; use {self.element}-token for this checkpoint"
            )


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class ByChannel(KVCache):
    """KIVI: keys have a scale for each channel and group of tokens, values for each token and group
    of channels. The reason: channels of keys differ much in size."""

    symmetric: Symmetric = False
    scales: Literal["channel"] = "channel"
    group_size: Annotated[
        int,
        Field(
            ge=2,
            le=65536,
            description="tokens whose keys share a scale in a channel, which are quantized once "
            "the group is full, and channels whose values share one in a token",
        ),
    ] = 32


def head_dim(config: Mapping[str, Any]) -> int | None:
    """A head's width, from a checkpoint's configuration; None where it does not say."""
    config = _text(config)
    if isinstance(config.get("head_dim"), int):
        return config["head_dim"]
    width = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "num_heads", "n_head")
    return width // heads if width and heads else None


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context in tokens that a configuration states."""
    return _first(_text(config), "max_position_embeddings", "n_positions")


def _windows(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    if kinds:
        return any(kind == "sliding_attention" for kind in kinds)
    return bool(config.get("use_sliding_window", True))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    found = (config.get(name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


for _bits, _type in ((8, "int"), (4, "int"), (3, "int"), (2, "int"), (8, "float")):
    for _scales, _kind, _line, _more in (
        ("token", KVCache, "a scale for each head and token", {}),
        ("channel", ByChannel,
         "keys along channels in groups of tokens, values along tokens (KIVI)", {}),
        ("tensor", KVCache, "one scale a layer; scores depend on the batch",
         {"group_size": WHOLE_ROW}),
    ):  # fmt: skip
        _fixed: dict[str, Any] = {"num_bits": _bits, "type": _type, "scales": _scales, **_more}
        if _type == "float":
            _fixed["symmetric"] = True
        if (_type, _scales) != ("float", "channel"):
            _cache = _kind(**_fixed)
            KV_CACHES.register(_cache.name, _kind, f"{_cache.element}, {_line}", **_fixed)
