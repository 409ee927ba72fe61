"""Softpick's rows of tiny scores as qbench.attention.kernels.mending computes them: against
float64, over and over, and with the flags that the backward pass goes by."""

import pytest
import torch
from gpu_tensors import draw
from test_attention_ways import compared, gradients, pairs, tiny_rows

from qbench.attention import kernels
from qbench.attention.kernels import gluon_backward, launch, modes, recall, tiles
from qbench.attention.kernels.settings import NONE, Parameters, Settings
from qbench.bench.attention_timing import given

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs Hopper",
    ),
]
ALL = {
    ("softpick", width, bits)
    for width in (64, 128)
    for bits in (0, modes.SCALED.value, modes.CAPPED.value, modes.SLOPED.value)
}


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    """However few the tokens. Gives what mends in some cases, or in none."""

    def choose(cases):
        monkeypatch.setattr(tiles, "MENDED", cases)
        recall.forget()

    monkeypatch.setattr(gluon_backward, "ENOUGH", 0)
    choose(ALL)
    yield choose
    recall.forget()


def forward(inputs, parameters, normalizer="softpick"):
    length, width = inputs[0].shape[2:]
    settings = Settings(normalizer, width**-0.5, 0.0, True, 0, length, length)
    return launch.forward(*inputs, None, None, parameters, settings)


@pytest.mark.parametrize("scores", [0.01, 0.3, 3.0, "some far"])
@pytest.mark.parametrize("length", [128, 640, 1152])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("shape", ["plain", "ALiBi", "soft cap"])
@pytest.mark.parametrize("normalizer", ["softpick", "scalable-softpick"])
def test_output_and_gradients_equal_the_float64_reference(normalizer, shape, width, length, scores):
    errors = compared(normalizer, shape, width, length, scores=scores)
    assert max(errors) <= (1e-2 if scores in (0.3, 3.0) else 3e-2), errors


@pytest.mark.parametrize("length", [1000, 1024, 4096])
@pytest.mark.parametrize("width", [64, 128])
def test_tiny_rows_keep_their_digits(width, length):
    inputs, parameters = tiny_rows(width, length)
    gradient = draw(1, 2, length, width, seed=3)
    found = pairs(inputs, gradient, parameters, normalizer="softpick")
    for at in (0, 3):  # the output and the gradients of values
        got, truth = (tensor.detach()[:, :, ::5].double() for tensor in found[at])
        rows = (got - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert float(rows.quantile(0.9)) <= 1e-2


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mixture", [1e-5, 1e-3])
def test_tiny_scores_all_over_among_large_negative_ones(width, mixture):
    query = torch.ones(1, 1, 1000, width, device="cuda", dtype=torch.bfloat16)
    key = draw(1, 1, 1000, width).abs() * mixture
    key[:, :, ::2] = -1
    gradient, value = (draw(1, 1, 1000, width, seed=seed) for seed in (2, 3))
    found = pairs([query, key, value], gradient, {}, normalizer="softpick")
    assert max((got - truth).norm() / truth.norm() for got, truth in found) <= 1e-2


@pytest.mark.parametrize("width", [64, 128])
def test_flags_are_as_without_and_outputs_next_to_it(width, mended):
    for inputs, parameters in (
        (tiny_rows(width)[0], Parameters(slopes=torch.full((2,), 4.0, device="cuda"))),
        ([draw(4, 16, 1024, width, seed=seed) for seed in range(3)],
         Parameters.of(given("softpick", 16, sloped=True))),
        ([draw(1, 2, 512, width, seed=seed) * 1e-3 for seed in range(3)], NONE),
    ):  # fmt: skip
        mended(set())
        usual = forward(inputs, parameters)
        mended(ALL)
        output, lse, flags = forward(inputs, parameters)
        assert torch.equal(flags, usual[2])
        assert flags.any()
        assert (output.double() - usual[0].double()).norm() <= 2e-3 * usual[0].double().norm()
        assert (lse - usual[1]).abs().max() <= 1e-3


@pytest.mark.parametrize("width", [64, 128])
def test_many_runs_give_the_same_bits(width):
    inputs = [draw(4, 16, 4096, width, seed=seed) for seed in range(3)]
    parameters = Parameters.of(given("softpick", 16, sloped=True))
    runs = [forward(inputs, parameters) for _ in range(8)]
    for other in runs[1:]:
        assert all(map(torch.equal, other, runs[0]))


def test_gradients_where_the_kernels_have_windows_too():
    """Which are not mended."""
    inputs = [draw(1, 2, 640, 64, seed=seed).requires_grad_() for seed in range(3)]
    gradient, parameters = draw(1, 2, 640, 64, seed=3), given("softpick", 2, sloped=True)
    settings = {"normalizer": "softpick", "window": 100}
    found = gradients(kernels.attention, inputs, gradient, parameters, **settings)
    assert all(tensor.isfinite().all() for tensor in found)
