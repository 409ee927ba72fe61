"""Linear layers over codes and scales, whose products are simulated or real."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from qbench.quantizers.config import PackedWeight
from qbench.quantizers.linear import Plain, Tensors
from qbench.quantizers.products.codes import decode, encode
from qbench.quantizers.products.weights import ScaledWeights


class Product(Protocol):
    """``paused``: inputs are to stay as they are."""

    @property
    def paused(self) -> bool: ...

    def __call__(self, x: Tensor, layer: ScaledLinear) -> Tensor: ...


class ScaledLinear(nn.Module):
    """``codes`` int8 or float8_e4m3fn [out, in], ``scale`` float32 [out, 1] or [1, 1]; its forward
    dequantizes, then multiplies."""

    def __init__(self, shape: Plain, tensors: Tensors) -> None:
        super().__init__()
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.dtype = shape.dtype
        self.register_buffer("codes", tensors["codes"])
        self.register_buffer("scale", tensors["scale"])
        self.register_buffer("bias", shape.bias)

    def dequantize(self) -> Tensor:
        """The weight, ``dtype`` [out, in]; computed in float32 and rounded once."""
        return decode(self.codes, self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, {self.codes.dtype}"


class RealLinear(ScaledLinear):
    """A ``ScaledLinear`` whose ``product`` multiplies codes by codes, but for while it is paused.
    A class of its own, so that an audit's record names what ran."""

    product: Product

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.product.paused else self.product(x, self)


def quantize(name: str, layer: nn.Linear, settings: ScaledWeights) -> Tensors:
    codes, scale = encode(layer.weight.detach(), settings.codes, settings.per)
    return {"codes": codes, "scale": scale}


def from_packed(shape: Plain, tensors: Tensors, settings: ScaledWeights) -> nn.Module:
    return ScaledLinear(shape, tensors).eval()


def unpack(module: nn.Module, settings: ScaledWeights) -> PackedWeight | None:
    if not isinstance(module, ScaledLinear):
        return None
    by_row = module.scale.numel() > 1

    def groups(weight: Tensor) -> Tensor:
        return weight if by_row else weight.reshape(1, -1)

    return PackedWeight(
        tensors={"codes": module.codes, "scale": module.scale},
        dequantize=lambda: decode(module.codes, module.scale).to(torch.float32),
        groups=groups,
    )
