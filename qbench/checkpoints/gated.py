"""Llama with a sigmoid gate on the output of attention, per head or per element, as Qwen3-Next's
``attn_output_gate``: the output is multiplied by σ(W x), x being the input of the layer's
attention, before ``o_proj``. No class of transformers has it without norms of queries and keys. W
is the linear layer ``g_proj``. Importing this module makes the class known to transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class GatedLlamaConfig(LlamaConfig):
    """Llama's configuration; ``gate``: ``head`` or ``element``, what one gate multiplies."""

    model_type = "gated-llama"
    gate: str = "head"


class GatedLlamaAttention(LlamaAttention):
    """Llama's attention with the gate: its forward pass with one line more."""

    def __init__(self, config: GatedLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        gates = config.num_attention_heads * (self.head_dim if config.gate == "element" else 1)
        self.g_proj = nn.Linear(config.hidden_size, gates, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [B, T, hidden], and the weights if the function has them. The
        KV cache is ``past_key_values`` before transformers 5.24, ``cache`` from there on."""
        cache = past_key_values if cache is None else cache
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        gate = torch.sigmoid(self.g_proj(hidden_states)).view(*shape[:-2], output.shape[-2], -1)
        return self.o_proj((output * gate).flatten(-2)), weights


class GatedLlamaForCausalLM(LlamaForCausalLM):
    config_class = GatedLlamaConfig

    def __init__(self, config: GatedLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = GatedLlamaAttention(config, index)
        self.post_init()


AutoConfig.register(GatedLlamaConfig.model_type, GatedLlamaConfig)
AutoModelForCausalLM.register(GatedLlamaConfig, GatedLlamaForCausalLM)


def model_class(name: str) -> type[transformers.PreTrainedModel]:
    """Return the class ``name`` of transformers, or the gated one of this module."""
    return globals().get(name) or getattr(transformers, name)
