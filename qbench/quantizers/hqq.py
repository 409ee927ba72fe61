"""Quantize layers by the hqq library, and build its modules from stored tensors."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.config import PackedWeight
from qbench.quantizers.linear import Tensors, bias_of, kept_weight
from qbench.quantizers.methods.weight_only import Hqq

# Its decorators would import torch's compiler, a second and more, for functions that are not called
with patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
    from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear, Quantizer

# The same product without a gradient, for which Python would bind arguments by name in each call
HQQLinear.set_backend(HQQBackend.PYTORCH_FORWARD)


class Layer(HQQLinear):
    """hqq's layer; it dequantizes only once if there is memory for the weight."""

    def dequantize(self) -> Tensor:
        """Return the weight [out, in] as hqq computes it, kept as ``kept_weight`` says."""
        stored = (self.W_q, self.meta["zero"], self.meta["scale"])
        return kept_weight(self, stored, super().dequantize)


def quantize(name: str, layer: nn.Linear, settings: Hqq) -> Tensors:
    """Return the codes, scales and zeros of ``layer`` by hqq. Raises QuantizationError, which
    begins with ``name``, if scales are not finite."""
    weight = layer.weight.detach()
    # it would wait for the GPU, and for its memory, five times per layer
    with patch.object(torch.cuda, "empty_cache", lambda: None) if weight.is_cuda else nullcontext():
        quantized = HQQLinear.from_weights(
            weight, None, _config(settings), compute_dtype=weight.dtype, device=str(weight.device)
        )
    scale, zero = quantized.meta["scale"], quantized.meta["zero"]
    if not all(torch.isfinite(part).all() for part in (scale, zero)):
        raise QuantizationError(
            f"{settings.name}: {name}: hqq gave scales that are not finite; name the layer in "
            "ignore"
        )
    return {"codes": quantized.W_q.data, "scale": scale, "zero": zero}


def from_packed(layer: nn.Linear, tensors: Tensors, settings: Hqq) -> nn.Module:
    """Return the hqq layer that computes ``layer`` with the weight in ``tensors``."""
    config, dtype, device = _config(settings), layer.weight.dtype, str(tensors["codes"].device)
    module = Layer(None, config, compute_dtype=dtype, device=device, initialize=False)
    packing = Quantizer.bit_to_packing[settings.num_bits]
    module.W_q = nn.Parameter(tensors["codes"], requires_grad=False)
    module.meta = {
        "nbits": settings.num_bits,
        "group_size": settings.group_length(layer.in_features),
        "shape": layer.weight.shape,
        "scale": tensors["scale"],
        "zero": tensors["zero"],
        "axis": settings.axis,
        "packing": packing,
        "unpack_view_dtype": Quantizer.unpack_view_dtype[packing],
        "view_as_float": False,
        "quant_scale": False,
        "quant_zero": False,
        "compute_dtype": dtype,
    }
    module.in_features, module.out_features = layer.in_features, layer.out_features
    module.bias = bias_of(layer)
    module.ready = True
    return module.eval()


def unpack(module: nn.Module, settings: Hqq) -> PackedWeight | None:
    """Return the stored tensors of an hqq layer; None for a module of another kind."""
    if not isinstance(module, HQQLinear):
        return None

    def groups(weight: Tensor) -> Tensor:
        size = settings.group_length(0)
        return weight.reshape(-1, size) if settings.axis == 1 else weight.reshape(size, -1).T

    return PackedWeight(
        tensors={"codes": module.W_q.data} | {n: module.meta[n] for n in ("scale", "zero")},
        dequantize=lambda: decode(module, settings),
        groups=groups,
    )


def decode(module: HQQLinear, settings: Hqq) -> Tensor:
    """Return the weight, float32 [out, in], from codes, zeros and scales. The rows of the grouped
    weight are cut into as many parts as codes fit into a word; the first part lies in the highest
    bits. Ten codes of 3 bits lie in the lower 30 bits of 32."""
    words, bits, shape = module.W_q.data, settings.num_bits, module.meta["shape"]
    fit = 10 if bits == 3 else 8 // bits
    parts = [(words >> bits * (fit - 1 - index)) & (2**bits - 1) for index in range(fit)]
    size = settings.group_length(0)
    rows = size if settings.axis == 0 else shape.numel() // size
    codes = torch.cat(parts)[:rows].float()
    weight = (codes - module.meta["zero"].float()) * module.meta["scale"].float()
    return weight.reshape(shape)


def _config(settings: Hqq) -> dict:
    """Return the settings as hqq's quant_config."""
    config = BaseQuantizeConfig(
        nbits=settings.num_bits, group_size=settings.group_length(0), axis=settings.axis
    )
    config["weight_quant_params"]["optimize"] = settings.optimize
    return config
