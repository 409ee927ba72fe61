"""A quantizer from outside the package, in one file: the signs of the weights and a scale a row.

Importing it registers ``sign-1bit``. With the row's mean magnitude as its scale it is the binary
weight network of Rastegari et al., XNOR-Net (2016), section 3.1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from qbench.quantizers import PackedWeight, WeightSettings, register, settings
from qbench.quantizers.linear import DequantizedLinear

PLACES = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@register("sign-1bit", "signs of the weights, a scale per row", num_bits=1)
@settings
class Sign(WeightSettings):
    """One bit a weight."""

    method: ClassVar[str] = "sign"
    title: ClassVar[str] = "Signs"

    num_bits: Literal[1]
    gain: Annotated[float, Field(gt=0, lt=2, description="times the mean magnitude")] = 1.0

    @property
    def scheme(self) -> str:
        return "sign per row"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 16 / columns

    def error_bound(self) -> float:
        """√(1 − 2/π) = 0.60 for Gaussian weights; heavier tails give more."""
        return 0.9


def quantize(name: str, layer: nn.Linear, settings: Sign) -> dict[str, Tensor]:
    weight = layer.weight.detach().float()
    signs = nn.functional.pad((weight > 0).to(torch.uint8), (0, -weight.shape[1] % 8))
    codes = (signs.view(len(weight), -1, 8) * PLACES.to(weight.device)).sum(-1)
    return {
        "codes": codes.to(torch.uint8),
        "scale": (weight.abs().mean(1) * settings.gain).half(),
    }


def from_packed(shape, tensors: dict[str, Tensor], settings: Sign) -> nn.Module:
    return SignLinear(shape, tensors).eval()


def unpack(module: nn.Module, settings: Sign) -> PackedWeight | None:
    if not isinstance(module, SignLinear):
        return None
    return PackedWeight(
        tensors={"codes": module.codes, "scale": module.scale},
        dequantize=module.dequantize,
        groups=lambda weight: weight,
    )


class SignLinear(DequantizedLinear):
    """``codes`` uint8 [out, in / 8], a sign a bit, and ``scale`` float16 [out]."""

    def dequantize(self) -> Tensor:
        bits = (self.codes[..., None] & PLACES.to(self.codes.device)).ne(0)
        signs = bits.reshape(len(self.codes), -1)[:, : self.in_features].float() * 2 - 1
        return (signs * self.scale[:, None].float()).to(self.dtype)
