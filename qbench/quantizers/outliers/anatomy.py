"""The parts of a decoder that treatments of outliers fold into each other.

Only classes are taken whose blocks are known to be
x + o_proj(attention(norm(x))), then x + down_proj(act(gate_proj(norm(x))) · up_proj(norm(x))),
with RMS norms whose weight is a plain factor; whatever else a block may hold is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from qbench.errors import QuantizationError
from qbench.quantizers.outliers.classes import KNOWN

BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # within a head, after the projection: nothing folds across
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """One decoder block under its ``name``."""

    name: str
    block: nn.Module

    @property
    def attention(self) -> nn.Module:
        return self.block.self_attn

    @property
    def mlp(self) -> nn.Module:
        return self.block.mlp

    @property
    def attention_norm(self) -> nn.Module:
        return self.block.input_layernorm

    @property
    def mlp_norm(self) -> nn.Module:
        return self.block.post_attention_layernorm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Anatomy:
    """``heads`` of ``head_dim`` share ``kv_heads`` keys and values."""

    embeddings: nn.Embedding
    blocks: tuple[Block, ...]
    norm: nn.Module
    head: nn.Linear
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def hidden(self) -> int:
        return self.embeddings.weight.shape[1]


def anatomy(model: PreTrainedModel, treatment: str) -> Anatomy:
    """The parts of ``model``.

    Raises QuantizationError, in the name of ``treatment``, for a class that is not known.
    """
    kind = type(model).__name__
    if kind not in KNOWN.values():
        raise QuantizationError(
            f"{treatment}: the blocks of {kind} are not known to it; it knows "
            f"{', '.join(dict.fromkeys(KNOWN.values()))}"
        )
    decoder, config = model.model, model.config
    blocks = []
    for index, block in enumerate(decoder.layers):
        name = f"model.layers.{index}"
        _require(block, BLOCK, set(), name, treatment)
        _require(block.self_attn, ATTENTION, HEAD_NORMS, f"{name}.self_attn", treatment)
        _require(block.mlp, MLP, set(), f"{name}.mlp", treatment)
        blocks.append(Block(name=name, block=block))
    return Anatomy(
        embeddings=decoder.embed_tokens,
        blocks=tuple(blocks),
        norm=decoder.norm,
        head=model.lm_head,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=blocks[0].attention.head_dim,
    )


def _require(
    module: nn.Module, wanted: set[str], allowed: set[str], name: str, treatment: str
) -> None:
    found = {child for child, _ in module.named_children()}
    if odd := (found ^ wanted) - allowed:
        kind, parts = type(module).__name__, ", ".join(sorted(odd))
        raise QuantizationError(f"{treatment}: {name} ({kind}) is not as known: {parts}")
