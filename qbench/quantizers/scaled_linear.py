"""Quantize weights to int8 or FP8 codes times a float32 scale per row or per matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.config import PackedWeight
from qbench.quantizers.fake_quant import encode
from qbench.quantizers.linear import DequantizedLinear, Tensors
from qbench.quantizers.methods.weight_only import Scaled8


class ScaledLinear(DequantizedLinear):
    """``codes`` int8 or float8_e4m3fn [out, in], ``scale`` float32 [out, 1] or [1, 1]."""

    def dequantize(self) -> Tensor:
        return (self.codes.float() * self.scale).to(self.dtype)


def quantize(name: str, layer: nn.Linear, settings: Scaled8) -> Tensors:
    codes, scale = encode(layer.weight.detach(), settings.format)
    return {"codes": codes, "scale": scale}


def from_packed(layer: nn.Linear, tensors: Tensors, settings: Scaled8) -> nn.Module:
    return ScaledLinear(layer, tensors).eval()


def unpack(module: nn.Module, settings: Scaled8) -> PackedWeight | None:
    if not isinstance(module, ScaledLinear):
        return None
    per_row = module.scale.numel() > 1

    def groups(weight: Tensor) -> Tensor:
        return weight if per_row else weight.reshape(1, -1)

    return PackedWeight(
        tensors={"codes": module.codes, "scale": module.scale},
        dequantize=lambda: module.codes.to(torch.float32) * module.scale,
        groups=groups,
    )
