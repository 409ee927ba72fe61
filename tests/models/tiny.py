"""A tiny random model of every class that ``qbench list models`` names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scoring_models import tokenizer

# One of each way; the others at night.
QUICK = ("llama", "gpt2", "opt", "gemma2", "mixtral", "stablelm", "gpt_oss", "falcon")

SMALL = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WINDOW = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip
SHARED = {**MOE, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
LATENT = {
    **MOE, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_key_value_heads": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
}  # fmt: skip
SPARSE_KEYS = {**LATENT, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 32}
GPT = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 256}
LINEAR = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}  # fmt: skip
STATES = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_d_ssm": 128, "mamba_expand": 2,
}  # fmt: skip

# What a class's configuration needs beside SMALL; None takes a field of SMALL away.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "stablelm": {},
    "smollm3": {},
    "gpt_neox": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 2},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 32},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "starcoder2": {"sliding_window": None},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**WINDOW, "logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.1},
    "granitemoe": {**MOE, "logits_scaling": 8.0},
    "mixtral": MOE,
    "olmoe": MOE,
    "qwen2_moe": SHARED,
    "qwen3_moe": SHARED,
    "phimoe": MOE,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": {**MOE, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "gpt_oss": {**MOE, **WINDOW},
    "qwen3_next": {**SHARED, **LINEAR},
    "qwen3_5_text": LINEAR,
    "afmoe": {**MOE, **WINDOW, "num_dense_layers": 0},
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": 64,
        "block_auto_adjust_ff_dim": False,
    },
    "bamba": {**STATES, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "falcon_h1": STATES,
    "nemotron": {},
    "ernie4_5": {},
    "glm": {},
    "glm4": {},
    "exaone4": WINDOW,
    "helium": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "apertus": {},
    "biogpt": {},
    "persimmon": {},
    "bloom": {"n_layer": 1, "n_head": 2},
    "falcon": {"head_dim": None, "alibi": True, "new_decoder_architecture": False},
    "mpt": {"d_model": 64, "n_heads": 2, "n_layers": 1, "max_seq_len": 256, "expansion_ratio": 1},
    "gptj": {**GPT, "rotary_dim": 16},
    "gpt_neo": {"num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2},
    "codegen": {**GPT, "rotary_dim": 16, "num_attention_heads": 4},
    "xglm": {"d_model": 64, "ffn_dim": 64, "num_layers": 1, "attention_heads": 2},
    "granite_swa": WINDOW,
    "mimo_v2_flash": {**MOE, **WINDOW},
    "mamba": {"state_size": 8, "num_attention_heads": None, "time_step_rank": 16},
    "mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1},
    "gemma3n_text": {
        **WINDOW,
        "vocab_size_per_layer_input": 400,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "nemotron_h": {
        **STATES,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 8,
        "n_groups": 1,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*-",
    },
    "minimax": {**MOE, "num_hidden_layers": 2, "layer_types": LINEAR["layer_types"]},
    "ernie4_5_moe": {**MOE, "moe_layer_start_index": 0, "moe_layer_end_index": -1},
}
KINDS = [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in CONFIGS]


def tiny_model(kind: str, **changes: Any) -> Any:
    """Random weights, large enough that every layer changes the answer; biases, norms and sinks,
    which begin as constants, are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    stated = {**SMALL, **CONFIGS.get(kind, {})}
    config = AutoConfig.for_model(
        kind, **{k: v for k, v in {**stated, **changes}.items() if v is not None or k not in SMALL}
    )
    config.initializer_range = 0.15
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.std() == 0:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def write_tiny(folder: Path, kind: str, **changes: Any) -> Path:
    """A checkpoint folder with its tokenizer."""
    tiny_model(kind, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
