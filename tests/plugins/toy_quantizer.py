"""A quantizer from outside the package, in one file: the signs of the weights and a scale per row.

Importing it registers ``sign-1bit``. With the row's mean magnitude as its scale it is the binary
weight network of Rastegari et al., XNOR-Net (2016), section 3.1.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from qbench.quantizers import WeightSettings, register, settings

PLACES = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@register("sign-1bit", "signs of the weights, a scale per row", num_bits=1)
@settings
class Sign(WeightSettings):
    """One bit per weight."""

    method = "sign"
    title = "Signs"
    num_bits: Literal[1]
    gain: float = Field(1.0, gt=0, lt=2, description="times the mean magnitude")

    scheme = "sign per row"
    error_bound = 0.9  # √(1 − 2/π) = 0.60 for Gaussian weights; heavier tails give more

    def shared_bits(self, rows: int, columns: int) -> float:
        return 16 / columns


def quantize(name: str, layer: nn.Linear, settings: Sign) -> dict[str, Tensor]:
    weight = layer.weight.detach().float()
    signs = nn.functional.pad((weight > 0).to(torch.uint8), (0, -weight.shape[1] % 8))
    codes = (signs.view(len(weight), -1, 8) * PLACES.to(weight.device)).sum(-1)
    return {
        "codes": codes.to(torch.uint8),
        "scale": (weight.abs().mean(1) * settings.gain).half(),
    }


def dequantize(layer: nn.Module, settings: Sign) -> Tensor:
    """``codes`` uint8 [out, in / 8], a sign per bit, and ``scale`` float16 [out]."""
    bits = (layer.codes[..., None] & PLACES.to(layer.codes.device)).ne(0)
    signs = bits.reshape(len(layer.codes), -1)[:, : layer.in_features].float() * 2 - 1
    return signs * layer.scale[:, None].float()
