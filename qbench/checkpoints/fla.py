"""Read flash-linear-attention's ``transformer`` models as a stock class of transformers.

Its attention is Llama's (same rotary embedding, no permutation), so the tensors carry over one to
one under other names. Earlier versions of `qbench train` wrote this format: with ``qbench_rotary:
false`` it is SmolLM 3's without a rotary embedding, with ``qbench_gate`` Llama's with a gate
(``gated.py``). Every field of a config is used, or known to be without effect on logits, or has the
one value that these classes compute; all else is refused by name."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qbench.errors import CheckpointError, shown

NORMALIZER_OF = {
    "flash_attn": "softmax",
    "parallel_attn": "softmax",
    "naive_attn": "softmax",
    "parallel_softpick_attn": "softpick",
    "naive_softpick_attn": "softpick",
    "parallel_rectified_attn": "rectified",
    "naive_rectified_attn": "rectified",
    "parallel_scaled_attn": "scalable-softmax-next",
    "naive_scaled_attn": "scalable-softmax-next",
    "parallel_scaled_softpick_attn": "scalable-softpick-next",
    "naive_scaled_softpick_attn": "scalable-softpick-next",
}
NAMES = (  # of tensors, and Llama's
    ("model.embeddings.", "model.embed_tokens."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
)
KEY_MAPPING = {re.escape(fla_name): llama for fla_name, llama in NAMES}  # for from_pretrained
TABLE = ".self_attn.logn"  # of the scaled variants: logarithms that follow from the positions


WITHOUT_EFFECT = frozenset({
    # how the same function is computed, or only its loss
    "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    # training and generation; the dtype is the recipe's to choose
    "initializer_range", "use_cache", "torch_dtype", "dtype",
    # what transformers notes down; auto_map names code, which is never run
    "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path",
    # what transformers models may return besides logits, and settings of classifiers
    "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward",
    # the format is a decoder whatever this says; encoder-decoder models are refused before
    "is_decoder", "is_encoder_decoder",
})  # fmt: skip
Size = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0, lt=1e30)]
Token = Annotated[int, Field(ge=0)]


class Config(BaseModel):
    """A config.json of the format without the fields ``WITHOUT_EFFECT``: the values that classes of
    transformers compute, and defaults of absent fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model_type: str
    attn_impl: Any = None
    qbench_normalizer: Any = None
    vocab_size: Size
    hidden_size: Size
    hidden_ratio: Positive | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Size
    num_heads: Size
    num_kv_heads: Size | None = None
    max_position_embeddings: Size
    norm_eps: Positive = 1e-6
    window_size: None = None
    qkv_bias: Literal[False, None] = None
    qk_norm: Literal[False, None] = None
    qbench_rotary: bool = True
    qbench_gate: Literal["head", "element"] | None = None
    rope_theta: Positive | None = None
    tie_word_embeddings: bool = False
    bos_token_id: Token | None = 1
    eos_token_id: Token | None = 2
    pad_token_id: Token | None = None
    hidden_act: Literal["swish", "silu"] = "swish"
    attention_bias: Literal[False, None] = None
    attnres_block_size: None = None  # attention over earlier layers' outputs
    use_myopic_loss: Literal[False, None] = None  # a second head
    elementwise_affine: Literal[True] = True
    norm_first: Literal[False, None] = None
    norm_bias: Literal[False, None] = None
    rope_scaling: None = None


def parse(config: dict[str, Any]) -> Config:
    """Return the checked ``config``. Raises CheckpointError, naming the field, for an unknown field
    and for a value that these classes do not compute."""
    try:
        return Config.model_validate({k: v for k, v in config.items() if k not in WITHOUT_EFFECT})
    except ValidationError as error:
        problem = error.errors()[0]
        name = problem["loc"][0]
        why = f"{problem['msg']}; correct it, or leave this checkpoint out"
        if problem["type"] == "missing":
            why = "fetch config.json again, or leave this checkpoint out"
        elif problem["type"] in ("none_required", "literal_error"):
            computed = problem["msg"].removeprefix("Input should be ")
            why = f"qbench computes {computed} only; leave this checkpoint out"
        elif problem["type"] == "extra_forbidden":
            why = "no known field of flash-linear-attention's transformer models; remove it if it "
            why += "changes nothing"
        value = shown(config[name]) if name in config else "is missing"
        raise CheckpointError(f"config.json: {name} {value}: {why}") from None


def recognizes(config: dict[str, Any]) -> bool:
    """Return whether ``config`` is of flash-linear-attention's ``transformer``."""
    return config.get("model_type") == "transformer"


def llama_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the equal class in transformers: ``model_type`` and its fields. Raises
    CheckpointError for unknown fields, impossible sizes, and values that no such class computes."""
    parsed = parse(config)
    hidden, heads, layers = parsed.hidden_size, parsed.num_heads, parsed.num_hidden_layers
    shared = parsed.num_kv_heads or heads
    if hidden % heads or (hidden // heads) % 2 or heads % shared:
        raise CheckpointError(
            f"config.json: hidden_size {hidden}, num_heads {heads}, num_kv_heads {shared}: heads "
            "must divide hidden_size into even parts, and num_kv_heads must divide num_heads"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (getattr(parsed, name) or 0) >= parsed.vocab_size:
            raise CheckpointError(
                f"config.json: {name} {getattr(parsed, name)}: must be below vocab_size "
                f"{parsed.vocab_size}"
            )
    theta = config.get("rope_theta", 10000.0 if parsed.qbench_rotary else None)
    if (theta is None) == parsed.qbench_rotary:
        raise CheckpointError(
            f"config.json: qbench_rotary {parsed.qbench_rotary} and rope_theta {theta} contradict "
            "each other: set rope_theta to null exactly if the model has no rotary embedding"
        )
    kind, fields = "llama", {}
    if parsed.qbench_gate is not None:
        if not parsed.qbench_rotary:
            raise CheckpointError(
                f"config.json: qbench_gate {parsed.qbench_gate} without a rotary embedding: no "
                "class computes that; leave the checkpoint out"
            )
        kind, fields = "gated-llama", {"gate": parsed.qbench_gate}
    elif not parsed.qbench_rotary:
        kind = "smollm3"
        fields = {"layer_types": ["full_attention"] * layers, "no_rope_layers": [0] * layers}
    return {
        "model_type": kind,
        "vocab_size": parsed.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": parsed.intermediate_size
        # flash-linear-attention's rule: 2/3 of hidden · ratio, rounded up to 256
        or 256 * math.ceil(int(hidden * (parsed.hidden_ratio or 4) * 2 / 3) / 256),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": parsed.max_position_embeddings,
        "rms_norm_eps": float(parsed.norm_eps),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta or 10000.0)},
        "tie_word_embeddings": parsed.tie_word_embeddings,
        "bos_token_id": parsed.bos_token_id,
        "eos_token_id": parsed.eos_token_id,
        "pad_token_id": parsed.pad_token_id,
        **fields,
    }


def in_transformers_words(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` in transformers' fields: translated by ``llama_settings``, which may raise
    CheckpointError, if it is flash-linear-attention's, else as it is."""
    return llama_settings(config) if recognizes(config) else config
