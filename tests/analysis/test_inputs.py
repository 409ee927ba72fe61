"""Inputs of linear layers: the grid, its error, and who shares a scale."""

import pytest
import torch

from qbench.analysis.inputs import Inputs, look, on_grid


@pytest.mark.parametrize(("bits", "end"), [(8, 127), (4, 7)])
def test_the_grid_is_symmetric_with_its_end_at_the_largest_value(bits, end):
    values = torch.linspace(-3, 3, 1001)[None]
    rounded = on_grid(values, values.abs().amax(-1, keepdim=True), bits)
    levels = (rounded / 3 * end).round()
    assert torch.allclose(rounded, levels * 3 / end)
    assert sorted(set(levels[0].int().tolist())) == list(range(-end, end + 1))
    assert (rounded - values).abs().max() <= 3 / end / 2 + 1e-6


def test_values_on_the_grid_have_no_error_and_zeros_stay_zeros():
    values = torch.arange(-7.0, 8.0).repeat(2, 3, 1)
    values[0, 1] = 0.0
    seen = Inputs(looks=[look(values)])
    found = seen.summary("layer")
    assert found.error_token["4"] == pytest.approx(0, abs=1e-6)
    empty = Inputs(looks=[look(torch.zeros(1, 2, 4))]).summary("empty")
    assert (empty.error_token["4"], empty.error_text["8"], empty.largest_to_rms) == (0, 0, None)


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
    found = Inputs(looks=[look(spoiled)]).summary("layer")
    assert found.error_token["8"] < 0.01 < 0.03 < found.error_text["8"]


def test_several_batches_are_summed_like_one():
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(5, 9, 16, generator=draw)
    one = Inputs(looks=[look(values)]).summary("layer")
    several = Inputs(looks=[look(values[:2]), look(values[2:])]).summary("layer")
    assert several.largest == one.largest == values.abs().max().item()
    assert several.rms == pytest.approx(values.square().mean().sqrt().item())
    for kind in ("error_token", "error_text"):
        assert getattr(several, kind) == pytest.approx(getattr(one, kind))
