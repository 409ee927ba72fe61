"""Small decoders of the classes that treatments of outliers know, with all that folds across."""

from typing import Any

import torch
from quantizer_models import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, SmolLM3Config

from qbench.attention.transformers import set_attention

BIASES = {"attention_bias": True, "mlp_bias": True}
WIDE_HEADS = {"head_dim": 16}  # times four heads: 64, not the hidden size
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, **BIASES),
    "llama-wide": LlamaConfig(
        **SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
    ),
    "llama-tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}, **WIDE_HEADS),
    "qwen3-head-norms": Qwen3Config(**SIZES, **WIDE_HEADS),
    "smollm3-without-rope": SmolLM3Config(**SIZES, no_rope_layers=[0, 0], pad_token_id=0),
}


def decoder(which: str, normalizer: str = "softmax", *, dtype=torch.float32) -> Any:
    """Random weights. Norms' weights and biases are far from 1 and 0, and four channels of the
    residual stream are thirty times the others."""
    draw = torch.Generator().manual_seed(0)
    config = type(CONFIGS[which])(**CONFIGS[which].to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=draw)
            if "norm" in name:
                parameter.copy_(1 + 0.4 * values)
            else:
                parameter.copy_(values / (parameter.shape[-1] ** 0.5 if values.dim() > 1 else 1))
        model.get_input_embeddings().weight[:, :4] *= 30
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model = model.eval().requires_grad_(False)
    set_attention(model, normalizer=normalizer, implementation="reference")
    return model
