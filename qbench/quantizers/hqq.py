"""Half-quadratic quantization through the hqq library. Zeros are whole numbers at 4 bits alone, as
the library has it."""

from __future__ import annotations

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.linears import (
    Plain,
    Progress,
    Stored,
    Tensors,
    linears,
    require_whole_groups,
)
from qbench.quantizers.settings import Hqq


def quantize(
    model: nn.Module, settings: Hqq, calibration: None, progress: Progress
) -> tuple[dict[str, Tensors], str]:
    """What is to be stored for each linear layer, and what did it.

    Raises QuantizationError for shapes that are no whole number of groups.
    """
    layers, result = linears(model), {}
    for name, layer in layers.items():
        if settings.axis == 1:
            require_whole_groups(settings, name, layer.in_features, "inputs")
        else:
            require_whole_groups(settings, name, layer.out_features, "outputs")
    for done, (name, layer) in enumerate(layers.items()):
        progress(name, done / len(layers))
        quantized = HQQLinear(
            _bare(layer),
            _config(settings),
            compute_dtype=layer.weight.dtype,
            device=str(layer.weight.device),
        )
        meta = quantized.meta
        result[name] = {"codes": quantized.W_q.data, "scale": meta["scale"], "zero": meta["zero"]}
        if not all(torch.isfinite(meta[part]).all() for part in ("scale", "zero")):
            raise QuantizationError(f"{settings.name}: {name}: hqq gave scales that are not finite")
    return result, "hqq"


def rebuild(shape: Plain, tensors: Tensors, settings: Hqq) -> nn.Module:
    config = _config(settings)
    module = HQQLinear(
        None, config, compute_dtype=shape.dtype, device=str(shape.device), initialize=False
    )
    packing = Quantizer.bit_to_packing[settings.bits]
    module.W_q = nn.Parameter(tensors["codes"], requires_grad=False)
    module.meta = {
        "nbits": settings.bits,
        "group_size": settings.group_size,
        "shape": torch.Size((shape.out_features, shape.in_features)),
        "scale": tensors["scale"],
        "zero": tensors["zero"],
        "axis": settings.axis,
        "packing": packing,
        "unpack_view_dtype": Quantizer.unpack_view_dtype[packing],
        "view_as_float": False,
        "quant_scale": False,
        "quant_zero": False,
        "compute_dtype": shape.dtype,
    }
    module.in_features, module.out_features = shape.in_features, shape.out_features
    module.bias = shape.bias
    module.ready = True
    return module.eval()


def read(module: nn.Module, settings: Hqq) -> Stored | None:
    if not isinstance(module, HQQLinear):
        return None

    def groups(weight: Tensor) -> Tensor:
        size = settings.group_size
        return weight.reshape(-1, size) if settings.axis == 1 else weight.reshape(size, -1).T

    return Stored(
        weight=module.dequantize(),
        tensors=(module.W_q.data, module.meta["scale"], module.meta["zero"]),
        groups=groups,
    )


def _config(settings: Hqq) -> dict:
    config = BaseQuantizeConfig(
        nbits=settings.bits, group_size=settings.group_size, axis=settings.axis
    )
    config["weight_quant_params"]["optimize"] = settings.optimize
    return config


def _bare(layer: nn.Linear) -> nn.Linear:
    """The layer without its bias, sharing its weight: the library empties what it is given."""
    with torch.device("meta"):
        bare = nn.Linear(layer.in_features, layer.out_features, bias=False)
    bare.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    return bare
