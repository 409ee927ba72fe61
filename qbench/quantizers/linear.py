"""The linear layers of a model that a quantizer is to replace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qbench.quantizers.config import matching
from qbench.quantizers.experts import is_routed, split
from qbench.quantizers.matrices import is_linear

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """What is kept of an unquantized linear layer: its shape, its bias, where it lies. ``routed``:
    it is an expert's, so that the number of its inputs depends on where tokens are sent."""

    in_features: int
    out_features: int
    bias: Tensor | None
    dtype: torch.dtype
    device: torch.device
    routed: bool = False


def linears(model: nn.Module, ignore: tuple[str, ...] = ()) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` of ``model`` but the LM head and what ``ignore`` names, by name, in the
    model's order."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and module is not head
    }
    ignored = matching(layers, ignore)
    return {name: layer for name, layer in layers.items() if name not in ignored}


def linearize(model: nn.Module) -> None:
    """Put linear layers in the place of every Conv1D (GPT-2's, which is one with its weight
    turned) and of experts that are kept as one parameter, in place; the LM head aside."""
    split(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            layer = nn.Linear(1, 1, bias=False, device="meta")
            layer.out_features, layer.in_features = module.nf, module.nx
            layer.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
            layer.bias = module.bias
            model.set_submodule(name, layer)


def plain(module: nn.Linear) -> Plain:
    return Plain(
        in_features=module.in_features,
        out_features=module.out_features,
        bias=None if module.bias is None else module.bias.detach(),
        dtype=module.weight.dtype,
        device=module.weight.device,
        routed=is_routed(module),
    )
