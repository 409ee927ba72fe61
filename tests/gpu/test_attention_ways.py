"""The Gluon kernels of the backward pass, with their ways of gluon_ways.py: against float64, over
and over, and what softpick's rows of tiny scores ask for."""

import pytest
import torch
from gpu_tensors import draw

from qbench.attention import kernels, reference
from qbench.attention.kernels import gluon_backward, launch, recall
from qbench.attention.kernels.settings import NONE, Parameters, Settings
from qbench.bench.attention_checks import relative_error
from qbench.bench.attention_timing import given

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs Hopper",
    ),
]
NORMALIZERS = (
    "softmax", "softpick", "rectified", "sigmoid", "softmax1", "softmax-sink", "scalable-softmax",
    "scalable-softpick", "scalable-softpick-next",
)  # fmt: skip
SHAPES = ("plain", "ALiBi", "soft cap")
LENGTHS = (128, 256, 384, 640, 1152)


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """However few the tokens."""
    monkeypatch.setattr(gluon_backward, "ENOUGH", 0)
    recall.forget()
    yield
    recall.forget()


def gradients(attend, inputs, gradient, parameters, **settings):
    output = attend(*inputs, causal=True, parameters=parameters, **settings)
    learned = [tensor for tensor in parameters.values() if tensor.requires_grad]
    return (output, *torch.autograd.grad(output, [*inputs, *learned], gradient))


def pairs(inputs, gradient, parameters, *, trained=False, **settings):
    """What the kernels give beside what the reference gives in float64: outputs and gradients."""
    found = []
    for attend, wide in ((kernels.attention, False), (reference.attention, True)):
        *leaves, of_output = [
            tensor.detach().to(torch.float64 if wide else tensor.dtype)
            for tensor in (*inputs, gradient)
        ]
        given_parameters = {
            name: tensor.detach().to(torch.float64 if wide else tensor.dtype)
            for name, tensor in parameters.items()
        }
        for tensor in (*leaves, *(given_parameters.values() if trained else ())):
            tensor.requires_grad_()
        found.append(gradients(attend, leaves, of_output, given_parameters, **settings))
    return list(zip(*found, strict=True))


def off(found):
    """Relative errors."""
    return [relative_error(got, truth) for got, truth in found]


def compared(normalizer, shape, width, length, *, scores=1.0, kv_heads=4, trained=False):
    """The relative errors of the output, of the gradients of q, k and v, and of parameters."""
    heads = 4
    sizes = ((heads, 0), (kv_heads, 1), (kv_heads, 2), (heads, 3))
    *inputs, gradient = [draw(2, h, length, width, seed=seed) for h, seed in sizes]
    if scores == "some far":
        inputs[1][:, :, ::50] *= 40.0
    else:
        inputs[0] *= scores
    parameters = given(normalizer, heads, sloped=shape == "ALiBi")
    softcap = 50.0 if shape == "soft cap" else None
    settings = {"normalizer": normalizer, "softcap": softcap}
    return off(pairs(inputs, gradient, parameters, trained=trained, **settings))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scores", [0.01, 0.3, 3.0, "some far"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_output_and_gradients_equal_the_float64_reference(normalizer, shape, width, scores, length):
    errors = compared(normalizer, shape, width, length, scores=scores)
    # Where few keys have all the weight, D from the rounded output nearly cancels dP.
    assert max(errors) <= (1e-2 if scores in (0.3, 3.0) else 3e-2), errors


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_shared_keys(normalizer, shape, width, kv_heads):
    assert max(compared(normalizer, shape, width, 640, kv_heads=kv_heads)) <= 1e-2


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("shape", ["plain", "ALiBi"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_gradients_of_parameters(normalizer, shape, width):
    errors = compared(normalizer, shape, width, 640, trained=True)
    assert max(errors[:4]) <= 1e-2, errors
    assert max(errors[4:], default=0.0) <= 5e-2, errors


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("normalizer", ["scalable-softmax", "scalable-softpick"])
def test_scales_of_either_sign_and_none(normalizer, width):
    """With the output's gradient that of a step towards other scales: of a random one next to
    nothing would be left in a sum over all rows."""
    inputs = [draw(2, heads, 640, width, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    scales = torch.tensor([0.3, -0.2, 0.0, -1.0], device="cuda")
    outputs = [
        reference.attention(
            *(tensor.double() for tensor in inputs), normalizer=normalizer, causal=True,
            parameters={"s": (scales + more).double()},
        )
        for more in (0.0, 0.3)
    ]  # fmt: skip
    gradient = (outputs[0] - outputs[1]).bfloat16()
    found = pairs(inputs, gradient, {"s": scales}, trained=True, normalizer=normalizer)
    errors = off(found)
    assert max(errors) <= 2e-2, errors


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("shape", ["plain", "ALiBi"])
@pytest.mark.parametrize("normalizer", ["softpick", "scalable-softpick", "rectified"])
def test_queries_of_zero_and_their_neighbours(normalizer, shape, width):
    """All scores of a row are 0 but for slopes."""
    inputs = [draw(1, 4, 384, width, seed=seed) for seed in range(3)]
    inputs[0][:, :, ::7] = 0.0
    gradient = draw(1, 4, 384, width, seed=3)
    parameters = given(normalizer, 4, sloped=shape == "ALiBi")
    assert max(off(pairs(inputs, gradient, parameters, normalizer=normalizer))) <= 1e-2


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_many_tiles_give_the_same_bits_in_every_run(normalizer, shape, width):
    for batch, length, heads in ((2, 4096, 8), (8, 1024, 8)):
        inputs = [draw(batch, heads, length, width, seed=seed) for seed in range(4)]
        parameters = Parameters.of(given(normalizer, heads, sloped=shape == "ALiBi"))
        softcap = 50.0 if shape == "soft cap" else 0.0
        settings = Settings(normalizer, width**-0.5, softcap, True, 0, length, length)
        made = launch.forward(*inputs[:3], None, None, parameters, settings)
        runs = [
            launch.backward(inputs[3], *inputs[:3], *made, None, None, parameters, settings)[:3]
            for _ in range(8)
        ]
        for other in runs[1:]:
            assert all(map(torch.equal, other, runs[0]))


def tiny_rows(width, length=1024):
    """Inputs in which every fifth row's only positive score is tiny, and its own key's."""
    inputs = [draw(1, 2, length, width, seed=seed).float() for seed in range(3)]
    query, key, _ = inputs
    size = key.norm(dim=-1, keepdim=True)
    query[:, :, ::5] = (key / size**2 * 3e-6 * width**0.5)[:, :, ::5]
    slopes = torch.full((2,), 4.0, device="cuda")
    return [tensor.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs], {
        "slopes": slopes
    }


@pytest.mark.parametrize("width", [64, 128])
def test_only_the_keys_of_tiny_rows_are_computed_precisely(width):
    inputs, parameters = tiny_rows(width)
    inputs[0][:, :, 512:] *= -1000.0  # no row after these has a positive score
    settings = Settings("softpick", width**-0.5, 0.0, True, 0, 1024, 1024)
    *_, flags = launch.forward(*inputs, None, None, Parameters.of(parameters), settings)
    assert flags.shape == (1, 2, 16)
    assert flags[:, :, :8].all()
    assert not flags[:, :, 8:].any()


@pytest.mark.parametrize("by", [0, 1 << 60])
@pytest.mark.parametrize("width", [64, 128])
def test_values_gradients_of_tiny_rows_keep_their_digits(width, by, monkeypatch):
    """Rows that nothing else adds to: where e^x − 1 had lost bits, they would be wrong by 1 %."""
    monkeypatch.setattr(gluon_backward, "ENOUGH", by)
    inputs, parameters = tiny_rows(width)
    gradient = draw(1, 2, 1024, width, seed=3)
    found = pairs(inputs, gradient, parameters, normalizer="softpick")
    got, truth = (tensor[:, :, ::5].double() for tensor in found[3])
    rows = (got - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert float(rows.quantile(0.9)) <= 1e-2


def test_flags_are_none_where_no_row_is_tiny():
    inputs = [draw(1, 2, 512, 64, seed=seed) for seed in range(3)]
    inputs[0][:, :, :, :] = inputs[1] * 0.5  # every row's own key has a large score
    settings = Settings("softpick", 0.125, 0.0, True, 0, 512, 512)
    *_, flags = launch.forward(*inputs, None, None, NONE, settings)
    assert not flags.any()
