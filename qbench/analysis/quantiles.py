"""Quantiles of more values than can be kept: counted by their first 16 bits, on their device."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
BINS = 1 << 16


def counts(values: Tensor) -> Tensor:
    """How many of ``values`` begin with each of the 65,536 patterns of 16 bits that a float32
    can begin with, which are the values of bfloat16: int64 [BINS], the pattern of sign 0 and the
    lowest magnitude first, negative ones from the middle on."""
    patterns = values.detach().float().contiguous().view(torch.int32) >> 16
    return torch.bincount((patterns & (BINS - 1)).flatten(), minlength=BINS)


def quantiles(found: Tensor, *, exact: bool) -> dict[str, float]:
    """Quantiles at LEVELS from :func:`counts`: the value that so large a share is no larger than.

    ``exact``: the values were bfloat16, so that a pattern is a value. Otherwise it stands for
    values of a range, and its middle, at most 0.4 % off, is what is given.
    """
    found = found.cpu()
    half = BINS // 2
    # Negative patterns count magnitudes upwards: turned round, all are in order of their values.
    ordered = torch.cat([found[half:].flip(0), found[:half]])
    patterns = torch.cat([torch.arange(half, BINS).flip(0), torch.arange(half)])
    bits = (patterns << 16) + (0 if exact else 1 << 15)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    values = bits.view(torch.float32)
    zero = (patterns == 0) | (patterns == half)
    values = torch.where(zero, 0.0, values)
    below = ordered.cumsum(0)
    total = int(below[-1])
    wanted = [min(total, max(1, -int(-level * total // 1))) for level in LEVELS]
    places = torch.searchsorted(below, torch.tensor(wanted))
    return {
        str(level): values[place].item()
        for level, place in zip(LEVELS, places.tolist(), strict=True)
    }
