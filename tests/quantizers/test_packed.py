"""Codes packed to their real bits, and the grid that they stand for."""

import pytest
import torch

from qbench.quantizers import packed


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [1, 9, 64])
def test_unpacking_gives_back_every_code(bits, width):
    codes = torch.randint(0, 2**bits, (5, width), generator=draw(), dtype=torch.uint8)
    assert torch.equal(packed.unpack_codes(packed.pack_codes(codes, bits), bits, width), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1, 8, 33])
def test_a_weight_inside_the_grid_moves_half_a_step_at_most(bits, symmetric, size):
    weight = torch.randn(11, 3, size, generator=draw())
    scale, zero = packed.grid(weight, bits, symmetric=symmetric)
    codes = packed.nearest(weight, scale, zero, bits)
    inside = (weight / scale + zero >= -0.5) & (weight / scale + zero <= 2**bits - 0.5)
    moved = ((codes - zero) * scale - weight).abs()
    assert inside.float().mean() > 0.5
    assert bool((moved <= scale * 0.5001)[inside].all())
