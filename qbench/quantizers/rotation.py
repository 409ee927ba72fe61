"""Rotate a decoder by a Hadamard matrix (QuaRot, Ashkboos et al. 2024): Q = D H / √n, with a
Hadamard matrix H and a diagonal D of random signs. A linear layer whose input is rotated gets W Q,
one whose output is to be rotated gets Qᵀ W; an RMS norm without a weight commutes with Q."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.quantizers.hadamard import factors, matrix
from qbench.quantizers.linear import set_parameter
from qbench.quantizers.methods.equal_models import Rotation


@torch.no_grad()
def transform(model: PreTrainedModel, settings: Rotation, tensors: Mapping[str, Tensor]) -> None:
    """Rotate ``model`` by Q, in place; ``tensors`` is not used. An LM head that shares the
    embeddings gets its own weights, since the last norm is multiplied into it only."""
    decoder, head = model.model, model.lm_head
    embeddings = decoder.embed_tokens
    draw = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randint(0, 2, (embeddings.weight.shape[1],), generator=draw)
    diagonal = (drawn * 2 - 1).to(model.device, torch.float64)
    if head.weight is embeddings.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    set_parameter(embeddings.weight, _rotated(embeddings.weight, diagonal))
    _inputs(decoder.norm, (head,), diagonal)
    for block in decoder.layers:
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        _inputs(block.input_layernorm, projections, diagonal)
        _inputs(block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), diagonal)
        for layer in (attention.o_proj, mlp.down_proj):
            set_parameter(layer.weight, _rotated(layer.weight.T, diagonal).T)
            if layer.bias is not None:
                set_parameter(layer.bias, _rotated(layer.bias, diagonal))
        _values(attention)
        if settings.online:
            weight = mlp.down_proj.weight
            set_parameter(weight, hadamard_transform(weight.double()))
            block.mlp = RotatedMlp(mlp)


def hadamard_transform(x: Tensor) -> Tensor:
    """Return x H / √n along the last axis of ``x`` [..., n]; n must have ``hadamard.factors``."""
    order = x.shape[-1]
    parts = factors(order)
    y, after = x, order
    for part in parts:
        after //= part
        rows = _matrix(part, x.dtype, x.device)
        # No axis is moved, which would copy: the last axis is multiplied from the right, others
        # from the left.
        y = y.reshape(-1, part) @ rows if after == 1 else rows.T @ y.reshape(-1, part, after)
    return y.reshape(x.shape) / math.sqrt(order)


@functools.lru_cache(maxsize=64)
def _matrix(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(matrix(order)).to(device, dtype)


class RotatedMlp(nn.Module):
    """An MLP that rotates the input of down_proj; its layers keep their names."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output for ``x`` [..., hidden], the input of down_proj rotated."""
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hadamard_transform(inner.float()).to(inner.dtype))


def _inputs(norm: nn.Module, layers: tuple[nn.Linear, ...], diagonal: Tensor) -> None:
    """Multiply the norm's weight into ``layers``, and rotate their inputs."""
    factor = norm.weight.double()
    for layer in layers:
        set_parameter(layer.weight, _rotated(layer.weight.double() * factor, diagonal))
    set_parameter(norm.weight, torch.ones_like(factor))


def _values(attention: nn.Module) -> None:
    """Rotate values within each head, and rotate back in o_proj."""
    made, used, width = attention.v_proj, attention.o_proj, attention.head_dim
    columns = made.weight.double().T.unflatten(1, (-1, width))
    set_parameter(made.weight, hadamard_transform(columns).flatten(1).T)
    if made.bias is not None:
        set_parameter(made.bias, hadamard_transform(made.bias.double().view(-1, width)).flatten())
    columns = used.weight.double().unflatten(1, (-1, width))
    set_parameter(used.weight, hadamard_transform(columns).flatten(1))


def _rotated(x: Tensor, diagonal: Tensor) -> Tensor:
    """Return ``x`` Q, computed in float64."""
    return hadamard_transform(x.double() * diagonal)
