"""Inputs of linear layers: the grid, its error, and who shares a scale."""

import pytest
import torch

from qbench.analysis.hidden import BITS, error


def on_grid(values, peaks, bits):
    """The definition, value by value."""
    step = peaks / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (values / step).round() * step, 0.0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shared", ["token", "text"])
def test_errors_are_those_of_a_symmetric_grid_that_ends_at_the_largest_value(bits, shared):
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3, 17, 32, generator=draw)
    values[1, 4] *= 100
    values[2, 5] = 0
    peaks = values.abs().amax(-1, keepdim=True)
    peaks = peaks if shared == "token" else peaks.amax(1, keepdim=True)
    expected = (on_grid(values, peaks, bits) - values).double().square().sum()
    assert error(values, peaks, bits).item() == pytest.approx(expected.item(), rel=1e-5)
