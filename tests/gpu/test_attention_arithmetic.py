"""Every way in which ``qbench bench attention --tiles`` computes weights, against float64: where
scores are small, where some are beyond a polynomial's reach, and where all are."""

import pytest
import torch
from gpu_tensors import draw

from qbench.attention import kernels, reference
from qbench.attention.kernels import launch
from qbench.bench.attention_checks import relative_error
from qbench.bench.attention_tiles import KINDS
from qbench.bench.attention_timing import given
from qbench.bench.attention_variants import CAP, VARIANTS, Variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OTHERS = [v for v in VARIANTS if v.reciprocals or v.tangents or v.sloped]
# As they are: the two passes need not compute tanh in the same way.
OTHERS += [
    Variant(normalizer=name, softcap=CAP)
    for name in ("softmax", "softpick", "rectified", "sigmoid")
]


@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("scores", [0.3, 3.0, 12.0, "some far"])
@pytest.mark.parametrize("variant", OTHERS, ids=str)
def test_output_and_gradients_equal_the_float64_reference(variant, scores, width, by, monkeypatch):
    monkeypatch.setattr(launch.gluon_backward, "ENOUGH", KINDS[by])
    inputs = [draw(2, 4, 640, width, seed=seed) for seed in range(3)]
    if scores == "some far":  # one key in fifty has scores of standard deviation 40, of both signs
        inputs[1][:, :, ::50] *= 40.0
    else:
        inputs[0] *= scores
    inputs = [tensor.requires_grad_() for tensor in inputs]
    parameters = given(variant.normalizer, 4, sloped=variant.sloped)
    if variant.normalizer == "sigmoid" and width == 128:
        parameters["bias"] = torch.linspace(-9.0, -2.0, 4, device="cuda")
    settings = {"normalizer": variant.normalizer, "causal": True}
    settings["softcap"] = variant.softcap or None
    gradient = draw(2, 4, 640, width, seed=3)
    with variant.chosen():
        output = kernels.attention(*inputs, parameters=parameters, **settings)
        got = (output, *torch.autograd.grad(output, inputs, gradient))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parameters = {name: tensor.double() for name, tensor in parameters.items()}
    truth = reference.attention(*wide, parameters=parameters, **settings)
    truths = (truth, *torch.autograd.grad(truth, wide, gradient.double()))
    errors = [relative_error(a, b) for a, b in zip(got, truths, strict=True)]
    # The instruction for tanh is right to 2^-11: of a score near a cap of 50, to a fortieth.
    limit = 3e-2 if variant.softcap and scores not in (0.3, 3.0) else 1e-2
    assert max(errors) <= limit, errors
