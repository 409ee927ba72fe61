"""Inputs of linear layers: the grid, its error, and who shares a scale."""

import pytest
import torch

from qbench.analysis.hidden import BITS, Inputs, error


def on_grid(values, peaks, bits):
    """The definition, value by value."""
    step = peaks / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (values / step).round() * step, 0.0)


def seen(first, *rest):
    return sum(map(Inputs.of, rest), Inputs.of(first))


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


def test_an_outlier_spoils_its_own_token_or_its_whole_text():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(2, 64, 32, generator=draw)
    values[0, 3, 5] = 1000.0
    plain, spoiled = values[1:], values[:1]
    error = {}
    for name, part in (("plain", plain), ("spoiled", spoiled)):
        rest = part.clone()
        rest[0, 3] = 0  # of the other tokens
        tokens, text = part.abs().amax(-1, keepdim=True), part.abs().max().reshape(1, 1, 1)
        for kind, peaks in (("token", tokens), ("text", text)):
            wrong = (on_grid(part, peaks, 8) - part)[0, [*range(3), *range(4, 64)]]
            error[name, kind] = (wrong.norm() / rest.norm()).item()
    assert error["spoiled", "token"] == pytest.approx(error["plain", "token"], rel=0.1)
    assert error["plain", "text"] < 0.02
    assert error["spoiled", "text"] == pytest.approx(1.0, abs=0.01)  # rounded to nothing
    found = seen(spoiled).summary("layer")
    assert found.error_token["8"] < 0.01 < 0.03 < found.error_text["8"]
