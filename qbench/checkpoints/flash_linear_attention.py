"""The format of flash-linear-attention's ``transformer`` models, as ``LlamaForCausalLM``.

Its attention is Llama's (same rotary embedding, no permutation), so the tensors carry over one
to one under other names. Its GatedMLP bypasses ``down_proj.forward`` when fused, which would
hide that layer from quantizers; the conversion also rids us of that.
"""

from __future__ import annotations

import math
import re
from typing import Any

from qbench.errors import CheckpointError

NORMALIZER_OF = {
    "parallel_attn": "softmax",
    "naive_attn": "softmax",
    "parallel_softpick_attn": "softpick",
    "naive_softpick_attn": "softpick",
    "parallel_rectified_attn": "rectified",
    "naive_rectified_attn": "rectified",
}
RENAMED = (
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^(model\.layers\.\d+)\.attn_norm\.", r"\1.input_layernorm."),
    (r"^(model\.layers\.\d+)\.mlp_norm\.", r"\1.post_attention_layernorm."),
    (r"^(model\.layers\.\d+)\.attn\.([qkvo]_proj)\.", r"\1.self_attn.\2."),
)
UNSUPPORTED = {
    "qk_norm": "normalized queries and keys",
    "qkv_bias": "biased projections",
    "window_size": "sliding-window attention",
}


def recognizes(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "transformer"


def normalizer(config: dict[str, Any]) -> str:
    """The normalizer that ``attn_impl`` names. Raises CheckpointError for an unknown one."""
    implementation = config.get("attn_impl", "parallel_attn")
    if implementation not in NORMALIZER_OF:
        raise CheckpointError(
            f"attn_impl {implementation!r} is not known; known: {', '.join(NORMALIZER_OF)}"
        )
    return NORMALIZER_OF[implementation]


def llama_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``LlamaConfig``. Raises CheckpointError for what Llama lacks."""
    for key, meaning in UNSUPPORTED.items():
        if config.get(key):
            raise CheckpointError(f"{key}={config[key]} ({meaning}) is not supported yet")
    hidden, heads = config["hidden_size"], config["num_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": config.get("intermediate_size") or _intermediate_size(config),
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_kv_heads") or heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",  # flash-linear-attention calls it swish
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "rms_norm_eps": config.get("norm_eps", 1e-6),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(config.get("rope_theta", 10000.0)),
        },
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "bos_token_id": config.get("bos_token_id", 1),
        "eos_token_id": config.get("eos_token_id", 2),
        "attention_bias": False,
        "mlp_bias": False,
    }


def llama_name(name: str) -> str:
    """The Llama name of a tensor; names that the two share come back as they are."""
    for pattern, replacement in RENAMED:
        name, changed = re.subn(pattern, replacement, name)
        if changed:
            break
    return name


def expected_shapes(settings: dict[str, Any]) -> dict[str, list[int]]:
    """Llama tensor names and shapes that ``settings`` asks for."""
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    width = settings["head_dim"] * settings["num_attention_heads"]
    shared = settings["head_dim"] * settings["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": [settings["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [settings["vocab_size"], hidden]
    for layer in range(settings["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        shapes |= {
            f"{place}.input_layernorm.weight": [hidden],
            f"{place}.post_attention_layernorm.weight": [hidden],
            f"{place}.self_attn.q_proj.weight": [width, hidden],
            f"{place}.self_attn.k_proj.weight": [shared, hidden],
            f"{place}.self_attn.v_proj.weight": [shared, hidden],
            f"{place}.self_attn.o_proj.weight": [hidden, width],
            f"{place}.mlp.gate_proj.weight": [inner, hidden],
            f"{place}.mlp.up_proj.weight": [inner, hidden],
            f"{place}.mlp.down_proj.weight": [hidden, inner],
        }
    return shapes


def _intermediate_size(config: dict[str, Any]) -> int:
    """flash-linear-attention's rule: 2/3 of hidden · ratio, rounded up to 256."""
    ratio = config.get("hidden_ratio") or 4
    return 256 * math.ceil(int(config["hidden_size"] * ratio * 2 / 3) / 256)
