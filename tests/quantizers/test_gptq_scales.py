"""Scales and zeros of a group, found without waiting for a GPU, against gptqmodel's."""

from types import SimpleNamespace

import pytest
import torch
from gptqmodel.quantization.quantizer import HF_OPTIMUM, Quantizer

from qbench.quantizers.optimum_patches import find_scales


def quantizer(bits, symmetric):
    settings = SimpleNamespace(bits=bits, sym=symmetric, mse=0.0)
    made = Quantizer(settings, name="no optimum")
    assert made.name != HF_OPTIMUM
    made.configure(perchannel=True)
    return made


def odd(draw):
    x = torch.randn(12, 128, generator=draw) * 0.02
    x[1], x[2] = x[1].abs(), -x[2].abs()
    x[3], x[4], x[5, 7] = 0.0, -0.0, torch.nan
    x[6], x[7, 3] = 1e-30, torch.inf
    x[8, 1:], x[9, 1:] = 0.0, -0.0
    return x


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_scales_and_zeros_are_those_of_the_library_to_the_bit(bits, symmetric):
    x = odd(torch.Generator().manual_seed(bits))
    theirs, ours = quantizer(bits, symmetric), quantizer(bits, symmetric)
    theirs.find_params(x, weight=True)
    find_scales(ours, x, weight=True)
    assert torch.equal(ours.maxq, theirs.maxq)
    for name in ("scale", "zero"):
        wanted, found = getattr(theirs, name), getattr(ours, name)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))  # NaN and −0 too
