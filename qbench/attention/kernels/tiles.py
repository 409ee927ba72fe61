"""Tile sizes, by what was measured on an H200; fixed, so that nothing is tuned while it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """``m`` queries by ``n`` keys, threads in ``warps`` of 32, loads in ``stages`` of a pipeline.
    ``tma``: keys and values through the tensor memory accelerator, where their layout lets it.
    ``skip``: values are neither read nor multiplied where no score of a tile is positive."""

    m: int
    n: int
    warps: int
    stages: int
    tma: bool = False
    skip: bool = False
    free: bool = False
    track: bool = True


def forward_tile(width: int, dtype: torch.dtype) -> Tile:
    """``width``: head dimension rounded up to a power of two."""
    if dtype == torch.float32:
        return (
            Tile(m=32, n=32, warps=4, stages=1)
            if width > 64
            else Tile(m=64, n=32, warps=4, stages=2)
        )
    if width <= 64:
        return Tile(m=128, n=64, warps=4, stages=3)
    if width == 128:
        return Tile(m=128, n=64, warps=8, stages=3)
    return Tile(m=128, n=64, warps=8, stages=2)


def key_tile(width: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(m=32, n=32, warps=4, stages=1)
    if width <= 64:
        return Tile(m=64, n=128, warps=8, stages=2)
    if width == 128:
        return Tile(m=64, n=64, warps=4, stages=2)
    return Tile(m=32, n=64, warps=8, stages=1)


def query_tile(width: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(m=32, n=32, warps=4, stages=1)
    if width <= 64:
        return Tile(m=128, n=64, warps=8, stages=2)
    if width == 128:
        return Tile(m=64, n=64, warps=4, stages=2)
    return Tile(m=64, n=32, warps=8, stages=1)


def decode_tile(width: int, dtype: torch.dtype) -> Tile:
    """``m`` is set by the group's queries."""
    n = 32 if dtype == torch.float32 or width > 128 else 64
    return Tile(m=16, n=n, warps=4, stages=3 if width <= 128 else 2, skip=True)
