"""Softmax's slopes from places that rows share (modes.SHARED): against float64, over and over."""

import pytest
import torch
from gpu_tensors import draw
from test_attention_ways import off, pairs

from qbench.attention.kernels import gluon_backward, launch, recall, tiles
from qbench.attention.kernels.settings import Parameters, Settings
from qbench.bench.attention_timing import given

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs Hopper",
    ),
]


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    """However few the tokens."""
    monkeypatch.setattr(tiles, "SHARED", {64, 128})
    monkeypatch.setattr(gluon_backward, "ENOUGH", 0)
    recall.forget()
    yield
    recall.forget()


@pytest.mark.parametrize("slopes", [(0.7, 0.5, 0.03, 0.004), (4.0, 1.5, 1.0, 0.0), (60.0,) * 4])
@pytest.mark.parametrize("settings", [{}, {"window": 100}], ids=str)
@pytest.mark.parametrize("scores", [0.01, 0.3, 3.0, "some far"])
@pytest.mark.parametrize("length", [128, 777, 1152])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("normalizer", ["softmax", "softmax1", "softmax-sink"])
def test_output_and_gradients_equal_the_float64_reference(
    normalizer, width, length, scores, settings, slopes
):
    *inputs, gradient = [draw(2, 4, length, width, seed=seed) for seed in range(4)]
    if scores == "some far":
        inputs[1][:, :, ::50] *= 40.0
    else:
        inputs[0] *= scores
    parameters = given(normalizer, 4) | {"slopes": torch.tensor(slopes, device="cuda")}
    errors = off(pairs(inputs, gradient, parameters, normalizer=normalizer, **settings))
    assert errors[0] <= 1e-2
    if max(slopes) < 1:  # where one key has all the weight, gradients of queries and keys are 0
        # Where few have, D from the rounded output nearly cancels dP.
        assert max(errors) <= (1e-2 if scores in (0.3, 3.0) else 3e-2), errors


@pytest.mark.parametrize("width", [64, 128])
def test_many_runs_give_the_same_bits_and_lse_is_as_without(width, monkeypatch):
    inputs = [draw(4, 16, 4096, width, seed=seed) for seed in range(3)]
    parameters = Parameters.of(given("softmax", 16, sloped=True))
    settings = Settings("softmax", width**-0.5, 0.0, True, 0, 4096, 4096)
    runs = [launch.forward(*inputs, None, None, parameters, settings)[:2] for _ in range(8)]
    for other in runs[1:]:
        assert all(map(torch.equal, other, runs[0]))
    monkeypatch.setattr(tiles, "SHARED", set())
    recall.forget()
    output, lse, _ = launch.forward(*inputs, None, None, parameters, settings)
    assert (runs[0][1] - lse).abs().max() <= 1e-4
    # each is off by 2.3e-3, most of it from rounding weights and output to bf16
    assert (runs[0][0].double() - output.double()).norm() <= 4e-3 * output.double().norm()
