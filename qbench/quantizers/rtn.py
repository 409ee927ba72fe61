"""Round to nearest in groups. Settings: ``qbench.quantizers.weights.Rtn``."""

from __future__ import annotations

from torch import nn

from qbench.quantizers import packed
from qbench.quantizers.linear import Tensors
from qbench.quantizers.packed import from_packed, unpack
from qbench.quantizers.weights import Rtn

__all__ = ["from_packed", "quantize", "unpack"]


def quantize(name: str, layer: nn.Linear, settings: Rtn) -> Tensors:
    weight = layer.weight.detach().float()
    groups = weight.view(layer.out_features, -1, settings.group_length(layer.in_features))
    scale, zero = packed.grid(groups, settings.num_bits, symmetric=settings.symmetric)
    codes = packed.nearest(groups, scale, zero, settings.num_bits).view_as(weight)
    return packed.pack(codes, scale[..., 0], zero[..., 0], settings.num_bits)
