"""The linear layers of a model that a quantizer is to replace, and how a quantized one is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.settings import WHOLE_ROW, Settings

Progress = Callable[[str, float], None]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """What is kept of an unquantized linear layer: its shape, its bias, where it lies."""

    in_features: int
    out_features: int
    bias: Tensor | None
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What a quantized module holds.

    ``weight``: [out, in], dequantized the way the library says. ``tensors``: all that is stored
    for it, bias and constant tables left out. ``groups`` rearranges a weight [out, in] into
    [number of groups, weights in a group].
    """

    weight: Tensor
    tensors: tuple[Tensor, ...]
    groups: Callable[[Tensor], Tensor]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` of ``model`` but the LM head, by name, in the model's order."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def plain(module: nn.Linear) -> Plain:
    return Plain(
        in_features=module.in_features,
        out_features=module.out_features,
        bias=None if module.bias is None else module.bias.detach(),
        dtype=module.weight.dtype,
        device=module.weight.device,
    )


def group_length(settings: Settings, in_features: int) -> int:
    """Weights in a group along a row of ``in_features``."""
    size = settings.group_size
    return in_features if size == WHOLE_ROW else size


def require_whole_groups(settings: Settings, name: str, features: int, what: str) -> None:
    """Raise QuantizationError where ``features`` are no whole number of groups."""
    size = group_length(settings, features)
    if features % size:
        fitting = [n for n in (8, 16, 32, 64, 128, 256) if features % n == 0]
        offer = (
            f"choose {' or '.join(map(str, fitting))}" if fitting else "no usual size divides it"
        )
        raise QuantizationError(
            f"{settings.name}: {name} has {features} {what}, no multiple of group_size {size}; "
            f"{offer}"
        )


def along_rows(size: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.reshape(-1, size)
