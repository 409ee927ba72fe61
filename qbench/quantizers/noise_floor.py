"""Add rounding noise of the dtype after each decoder layer of an unquantized model.

Its KL divergence is a floor: less cannot be distinguished from another order of the same sums. One
in twelve of a layer's output values moves by one unit in its last place, which has the variance of
rounding to nearest. A hash of the value's bits, its channel and its layer decides which values
move, so that no score depends on other tokens or rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.quantizers.config import ActivationEvidence
from qbench.quantizers.methods.input_formats import RoundingNoise
from qbench.streaming import decoder_blocks

ONE_IN = 12


def install(model: PreTrainedModel, settings: RoundingNoise, tensors: Any) -> None:
    """Add rounding noise to the output of each decoder layer of ``model``, by forward hooks."""

    def noisy(number: int, module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (moved(output[0], number), *output[1:])
        return moved(output, number)

    for number, layer in enumerate(decoder_blocks(model)[1]):
        layer.register_forward_hook(partial(noisy, number))


def evidence(model: nn.Module, settings: RoundingNoise) -> dict[str, ActivationEvidence]:
    """Return an empty mapping: no input of a linear layer is quantized."""
    return {}


def moved(x: Tensor, layer: int) -> Tensor:
    """Return ``x`` [..., channels], one value in ``ONE_IN`` moved by a unit in its last place.
    Which ones depends on their bits, the channel and the number ``layer``."""
    bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
    channel = torch.arange(x.shape[-1], device=x.device)
    mixed = (bits.long() * 0x9E3779B1 + channel * 0x85EBCA6B + layer * 0xC2B2AE35) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # "lowbias32"
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    drawn = mixed % (2 * ONE_IN)
    step = (drawn == 0).to(bits.dtype) - (drawn == 1).to(bits.dtype)
    return torch.where((x != 0) & x.isfinite(), (bits + step).view(x.dtype), x)
