"""How gptqmodel stores a layer: codes and zeros, bit by bit in 32-bit words, the lowest bit first.

Its own packing moves every layer to the CPU and takes 32 rows at a time in int64: 65 ms a layer of
1,024 × 2,816. The same words come of a few launches where the layer lies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORD = 32


def packed(
    weight: Tensor, scale: Tensor, zero: Tensor, group: Tensor, bits: int
) -> dict[str, Tensor]:
    """What gptqmodel's ``pack`` makes of a quantized ``weight`` [out, in], to the bit.

    ``scale`` and ``zero``: float32 [out, groups]; ``group`` [in]: the number of each input's. In
    and out are multiples of 32. ``qweight`` int32 [in · bits / 32, out], ``qzeros`` int32 [groups,
    out · bits / 32], ``scales`` float16 [groups, out], ``g_idx`` int32 [in].
    """
    scale, zero = scale.T.contiguous(), zero.T.contiguous()
    own = group.to(weight.device, torch.long)
    codes = torch.round((weight.T + (zero * scale)[own]) / scale[own]).clamp_(0, 2**bits - 1)
    return {
        "qweight": words(codes.to(torch.int32), bits),
        "qzeros": words(zero.T.to(torch.int32), bits).T.contiguous(),
        "scales": scale.to(torch.float16),
        "g_idx": group.to(weight.device, torch.int32),
    }


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, m], 0 … 2^bits − 1 → int32 [n · bits / 32, m]: those of a column one after
    another."""
    width = math.gcd(bits, WORD)  # no field of so many bits lies in two words
    part = torch.arange(0, bits, width, device=codes.device, dtype=torch.int32)
    place = torch.arange(0, WORD, width, device=codes.device, dtype=torch.int32)
    fields = (codes[:, None] >> part[:, None]) & (2**width - 1)
    fields = fields.reshape(-1, len(place), codes.shape[1])
    return (fields << place[:, None]).sum(1, dtype=torch.int32)


def unpacked(stored: Tensor, bits: int) -> Tensor:
    """int32 [n · bits / 32, m] → float32 [n, m]: the inverse of ``words``."""
    shifts = torch.arange(WORD, device=stored.device, dtype=torch.int32)
    stream = ((stored[:, None] >> shifts[:, None]) & 1).to(torch.uint8)
    planes = stream.reshape(-1, bits, stored.shape[1])
    return sum(planes[:, bit].float() * 2**bit for bit in range(bits))
