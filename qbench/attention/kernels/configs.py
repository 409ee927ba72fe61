"""The tiles, warps and pipeline stages of each kernel, as measured on an H200. They are fixed:
nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qbench.attention.kernels.common import CAPPED, ELEMENTWISE, SLOPED
from qbench.attention.normalizers import Kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of ``block_q`` queries by ``block_k`` keys, ``num_warps`` warps of 32 threads,
    ``num_stages`` of loads. ``tma``: by the tensor memory accelerator if layouts allow it."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Return the arguments that every kernel's launch takes."""
        return {"BLOCK_K": self.block_k, "STAGES": self.num_stages, "num_warps": self.num_warps}


# Of the two kernels of hopper_backward.py, by head dimension: how many tiles of 64 keys the first
# one's buffers hold, and of 64 queries the second's; of how many queries a tile of its products is.
HOPPER_STAGES = {64: (6, 5), 128: (4, 4)}
HOPPER_BLOCK_Q = {64: 64, 128: 32}

# Flags that take so many registers or instructions that smaller tiles, of which more programs share
# a multiprocessor, are faster.
COSTLY = CAPPED.value | SLOPED.value | ELEMENTWISE.value


SHORT = 768  # keys: a sequence of so many or fewer is short


def forward_config(
    width: int, dtype: torch.dtype, kernels: Kernels, flags: int, *, short: bool = False
) -> Config:
    """Return the forward pass' configuration. ``width``: the head width, rounded up to a power of
    2; ``flags``: the bits of FLAGS in ``common``; ``short``: sequences are short, in packs and in
    padded batches, whose rows have the same bits for it."""
    if dtype == torch.float32:
        return _exact(width)
    if short and width <= 128:  # a third less time for packs of questions and their answers
        return Config(block_q=64, block_k=32, num_warps=4, num_stages=2, tma=width > 64)
    if width <= 128:
        # Its scores take so few registers that taller tiles fit.
        tall = kernels.score_function == "softmax" and flags & COSTLY == 0 and width <= 64
        return Config(block_q=128 if tall else 64, block_k=64, num_warps=4, num_stages=3, tma=True)
    return Config(block_q=128, block_k=64, num_warps=8, num_stages=2, tma=True)


# Of the backward pass' two kernels, by a head's width; for narrower ones those of the first.
DQ = {
    64: Config(block_q=64, block_k=64, num_warps=4, num_stages=3),
    128: Config(block_q=128, block_k=64, num_warps=8, num_stages=3, tma=True),
    256: Config(block_q=64, block_k=32, num_warps=8, num_stages=1, tma=True),
}
DKDV = {
    64: Config(block_q=32, block_k=128, num_warps=4, num_stages=3),
    128: Config(block_q=64, block_k=64, num_warps=4, num_stages=2, tma=True),
    256: Config(block_q=32, block_k=64, num_warps=8, num_stages=1, tma=True),
}


def backward_config(kernel: dict[int, Config], width: int, dtype: torch.dtype) -> Config:
    """Return the configuration of the backward kernel ``kernel``, :data:`DQ` or :data:`DKDV`."""
    return _exact(width) if dtype == torch.float32 else kernel[max(width, 64)]


def decode_config(width: int, dtype: torch.dtype, rows: int) -> Config:
    """Return the configuration of decoding for heads of ``width``. ``rows``: heads × queries that
    share keys."""
    if dtype == torch.float32 or width > 128:
        # Triton's pipeliner (3.6, 3.7) ends the process where warpgroups multiply with value rows
        # that may be left out.
        stages = 1 if rows > 32 else 2
        return Config(block_q=16, block_k=32, num_warps=4, num_stages=stages)
    warps = 2 if width == 128 else 1
    return Config(block_q=16, block_k=32, num_warps=warps, num_stages=3)


def _exact(width: int) -> Config:
    """Return the configuration for float32 without tensor cores: registers allow small tiles."""
    return Config(block_q=32, block_k=32 if width <= 128 else 16, num_warps=4, num_stages=1)
