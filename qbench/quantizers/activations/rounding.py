"""Rounding activations to evenly spaced levels and back, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric(x: Tensor, bits: int) -> Tensor:
    """Each row of ``x`` [..., n] to the nearest of 2^bits − 1 levels, 0 in the middle.

    scale = max|x| / (2^(bits−1) − 1), codes round(x / scale), half to even. A row of zeros stays
    one; a row with NaN or infinite values becomes NaN throughout, so that it cannot pass for a
    number.
    """
    most = 2 ** (bits - 1) - 1
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / most
    codes = torch.round(wide / torch.where(scale == 0, 1.0, scale)).clamp(-most, most)
    return (codes * scale).to(x.dtype)
