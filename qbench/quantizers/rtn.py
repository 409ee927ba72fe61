"""Round to nearest in groups: the yardstick that every method must beat."""

from __future__ import annotations

from torch import nn

from qbench.quantizers import packed
from qbench.quantizers.linears import (
    Plain,
    Progress,
    Stored,
    Tensors,
    group_length,
    linears,
    require_whole_groups,
)
from qbench.quantizers.settings import Rtn


def quantize(
    model: nn.Module, settings: Rtn, calibration: None, progress: Progress
) -> tuple[dict[str, Tensors], str]:
    """What is to be stored for each linear layer, and what did it.

    Raises QuantizationError for shapes that are no whole number of groups.
    """
    layers, result = linears(model), {}
    for name, layer in layers.items():
        require_whole_groups(settings, name, layer.in_features, "inputs")
    for done, (name, layer) in enumerate(layers.items()):
        progress(name, done / len(layers))
        weight = layer.weight.detach().float()
        groups = weight.view(layer.out_features, -1, group_length(settings, layer.in_features))
        scale, zero = packed.grid(groups, settings.bits, symmetric=settings.symmetric)
        codes = packed.nearest(groups, scale, zero, settings.bits).view_as(weight)
        result[name] = packed.tensors_of(codes, scale[..., 0], zero[..., 0], settings.bits)
    return result, "round to nearest"


def rebuild(shape: Plain, tensors: Tensors, settings: Rtn) -> nn.Module:
    group_size = group_length(settings, shape.in_features)
    return packed.rebuild(shape, tensors, bits=settings.bits, group_size=group_size)


def read(module: nn.Module, settings: Rtn) -> Stored | None:
    if not isinstance(module, packed.PackedLinear):
        return None
    return packed.read(module, group_length(settings, module.in_features))
