"""Values as codes and scales: the definition that products, layers and kernels share.

The grids are those of simulated activations: int8 codes −127 … 127 of scale max|x| / 127, E4M3
elements of scale max|x| / 448, float32 scales, ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "e4m3": 448.0}
DTYPE = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}

Coded = tuple[Tensor, Tensor]  # codes [rows, columns]; float32 scales [rows, 1] or [1, 1]


def encode(x: Tensor, kind: str, per: str, fixed: Tensor | None = None) -> Coded:
    """Rows ``x`` [rows, columns] as codes with a scale ``per`` row or tensor, or a ``fixed`` one,
    float32 [1, 1], beyond which values are clipped.

    What is not finite makes the scale NaN, and so all that is multiplied by it.
    """
    wide = x.float()
    largest = wide.new_full((), LARGEST[kind])  # by a plain number, CUDA multiplies by 1 / it
    if fixed is not None:
        scale = torch.where(torch.isfinite(wide).all(1, keepdim=True), fixed, torch.nan)
    elif per == "row":
        scale = wide.abs().amax(1, keepdim=True) / largest
    else:
        scale = (wide.abs().amax() / largest).view(1, 1)
    scale = torch.where(torch.isinf(scale), torch.nan, scale)
    ratio = wide / torch.where(scale == 0, 1.0, scale)
    ratio = ratio.nan_to_num(0.0).clamp(-LARGEST[kind], LARGEST[kind])
    return (torch.round(ratio) if kind == "int8" else ratio).to(DTYPE[kind]), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """What they stand for, float32 [rows, columns]."""
    return codes.float() * scale
