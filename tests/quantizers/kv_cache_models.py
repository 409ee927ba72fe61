"""Small models with a KV cache of few bits."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qbench.attention.transformers import set_attention
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),  # norms its keys before RoPE
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)),
}
SCHEMES = {
    "token": {"name": "int4-token"},
    "token, first": {"name": "int3-token", "sink_tokens": 2},
    "fp8": {"name": "fp8-token", "sink_tokens": 1},
    "token in groups": {"name": "int4-token", "group_size": 8},
}  # fmt: skip


def model_of(kind="llama", normalizer="softmax", scheme=None):
    torch.manual_seed(0)
    model = MODELS[kind]().eval().requires_grad_(False)
    set_attention(model, normalizer=normalizer, implementation="reference")
    if scheme is None:
        return model
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    return apply(model, quantizer, {})


def ids(*shape, seed=0):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))
