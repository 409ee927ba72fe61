"""The kernels on a GPU: accuracy in full, and what makes them fail elsewhere."""

import pytest
import torch
from gpu_tensors import draw

from qbench.attention import kernels, reference
from qbench.attention.kernels import supported
from qbench.attention.normalizers import NORMALIZERS
from qbench.bench.checks import CASES, LIMITS, errors, limit, relative_error
from qbench.bench.timing import given

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = supported()
IN_GLUON = NAMES


def attention(query, key, value, normalizer):
    parameters = given(normalizer, query.shape[1])
    return kernels.attention(
        query, key, value, normalizer=normalizer, parameters=parameters, causal=True
    )


def truth_of(wide, normalizer):
    parameters = given(normalizer, wide[0].shape[1])
    return reference.attention(*wide, normalizer=normalizer, parameters=parameters, causal=True)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_equal_the_float64_reference(case, normalizer, dtype):
    if not case.fits(dtype, normalizer):
        pytest.skip("not for this dtype, or for the normalizers that this one derives from")
    found = errors(case, normalizer, dtype, seed=7)
    assert {what: e for what, e in found.items() if not e <= limit(what, dtype)} == {}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("length", [1, 700, 32768])
@pytest.mark.parametrize("kind", ["negative first", "all negative", "zeros", "huge", "tiny"])
def test_extreme_scores_give_finite_results_and_gradients(kind, normalizer, dtype, length):
    query, key, value = (draw(1, 1, length, 64, dtype=dtype, seed=s) for s in range(3))
    if kind == "negative first":
        query, key = torch.ones_like(query), key * 0.1
        key[:, :, : length // 2] -= 14
    elif kind == "all negative":
        query, key = query.abs(), -key.abs() * 10
    elif kind == "zeros":
        query = query * 0
    elif kind == "huge":
        query, key = query * 100, key * 100
    else:
        query = query * 1e-4
    inputs = [tensor.requires_grad_() for tensor in (query.detach(), key.detach(), value)]
    output = attention(*inputs, normalizer)
    gradients = torch.autograd.grad(output, inputs, draw(1, 1, length, 64, dtype=dtype, seed=9))
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))


@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("mixture", [1e-5, 1e-3])
def test_tiny_positive_scores_among_large_negative_ones_are_exact(normalizer, mixture):
    """Where the fast path has lost the bits of e^x − 1, the tile is computed again."""
    query = torch.ones(1, 1, 300, 64, device="cuda", dtype=torch.bfloat16)
    key = draw(1, 1, 300, 64).abs() * mixture
    key[:, :, ::2] = -1
    value = draw(1, 1, 300, 64, seed=2)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    gradient = draw(1, 1, 300, 64, seed=3)
    output = attention(*inputs, normalizer)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = truth_of(wide, normalizer)
    got = (output, *torch.autograd.grad(output, inputs, gradient))
    expected = (truth, *torch.autograd.grad(truth, wide, gradient.double()))
    assert max(relative_error(a, b) for a, b in zip(got, expected, strict=True)) <= 1e-2


@pytest.mark.parametrize("normalizer", NAMES)
def test_every_row_is_written(normalizer):
    query, key, value = (draw(2, 2, 333, 64, seed=s) for s in range(3))
    expected = attention(query, key, value, normalizer).clone()
    poison = torch.full((64 << 20,), float("nan"), device="cuda")  # what empty memory will hold
    del poison
    got = attention(query, key, value, normalizer)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("normalizer", NAMES)
def test_gradients_are_the_same_bits_in_every_run(normalizer):
    inputs = [draw(2, 4, 777, 64, seed=s).requires_grad_() for s in range(3)]
    gradient = draw(2, 4, 777, 64, seed=3)
    runs = []
    for _ in range(3):
        output = attention(*inputs, normalizer)
        runs.append(torch.autograd.grad(output, inputs, gradient))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("normalizer", IN_GLUON)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("tiny", [False, True])
def test_gradients_in_gluon_equal_the_reference_in_every_run(
    normalizer, width, kv_heads, tiny, monkeypatch
):
    from qbench.attention.kernels import hopper, ops

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(hopper, "MIN_WORK", 0)
    query, key, value, gradient = (
        draw(2, heads, 1152, width, seed=seed)
        for seed, heads in enumerate((4, kv_heads, kv_heads, 4))
    )
    if tiny:  # needs the series for e^x − 1
        query, key = torch.ones_like(query), key.abs() * 1e-5
        key[:, :, ::2] = -1
    flags = ops.flags_of(NORMALIZERS.get(normalizer).kernels, ops.NONE, 0.0)
    assert hopper.fits(query, key, value, True, 0, flags)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    runs = []
    for _ in range(3):
        output = attention(*inputs, normalizer)
        runs.append(torch.autograd.grad(output, inputs, gradient))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = truth_of(wide, normalizer)
    expected = torch.autograd.grad(truth, wide, gradient.double())
    pairs = zip(runs[0], expected, strict=True)
    assert max(relative_error(a, b) for a, b in pairs) <= 1e-2


@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("enough", [0, 1 << 60], ids=["gluon", "triton"])
def test_slopes_have_the_references_gradient_from_both_backward_kernels(
    normalizer, enough, monkeypatch
):
    """In the cases of the bench they are trained together with s, which Gluon does not do."""
    from qbench.attention.kernels import hopper

    monkeypatch.setattr(hopper, "MIN_WORK", enough)
    inputs = [draw(2, 4, 640, 64, seed=s).requires_grad_() for s in range(3)]
    gradient = draw(2, 4, 640, 64, seed=3)
    parameters = given(normalizer, 4, sloped=True)
    slopes = parameters["slopes"].requires_grad_()
    settings = {"normalizer": normalizer, "causal": True, "softcap": 5.0}
    output = kernels.attention(*inputs, parameters=parameters, **settings)
    got = (output, *torch.autograd.grad(output, [*inputs, slopes], gradient))
    wide = [tensor.detach().double().requires_grad_() for tensor in (*inputs, slopes)]
    parameters = {name: tensor.double() for name, tensor in parameters.items()}
    parameters["slopes"] = wide[3]
    truth = reference.attention(*wide[:3], parameters=parameters, **settings)
    truths = (truth, *torch.autograd.grad(truth, wide, gradient.double()))
    errors = [relative_error(a, b) for a, b in zip(got, truths, strict=True)]
    assert max(errors[:4]) <= 1e-2
    assert errors[4] <= 5e-2


@pytest.mark.parametrize("enough", [0, 1 << 60], ids=["gluon", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("seen", ["one key", "many keys"])
def test_gradients_of_rows_near_zero_equal_the_reference(
    seen, width, kv_heads, dtype, enough, monkeypatch
):
    """Of one key whose score is nearly 0, and of many: 1 / Σ multiplies what is left of dP − D."""
    from qbench.attention.kernels import hopper

    monkeypatch.setattr(hopper, "MIN_WORK", enough)
    query, key, value, gradient = (
        draw(2, heads, 384, width, dtype=dtype, seed=seed)
        for seed, heads in enumerate((4, kv_heads, kv_heads, 4))
    )
    if seen == "one key":
        first = key[:, :, :1].repeat_interleave(4 // kv_heads, 1).float()
        factor = 1e-3 * width**0.5 / first.square().sum(-1, keepdim=True)
        query[:, :, :1] = (first * factor).to(dtype)
    else:
        query[:, :, [1, 5, 130, 255, 383]] *= 1e-3
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    runs = []
    for _ in range(2):
        output = kernels.attention(*inputs, normalizer="softpick", causal=True)
        runs.append(torch.autograd.grad(output, inputs, gradient))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = reference.attention(*wide, normalizer="softpick", causal=True)
    expected = torch.autograd.grad(truth, wide, gradient.double())
    pairs = zip(runs[0], expected, strict=True)
    assert max(relative_error(a, b) for a, b in pairs) <= LIMITS[dtype]


@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("width", [64, 128])
def test_packed_sequences_equal_each_alone(normalizer, width):
    cu_seqlens = torch.tensor([0, 5, 5, 300, 301, 900], dtype=torch.int32, device="cuda")
    inputs = [draw(1, 4, 900, width, seed=s).requires_grad_() for s in range(3)]
    settings = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    settings["parameters"] = given(normalizer, 4)
    got = kernels.packed_attention(*inputs, normalizer=normalizer, max_seqlen_q=600, **settings)
    gradient = draw(1, 4, 900, width, seed=3)
    gradients = torch.autograd.grad(got, inputs, gradient)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = reference.packed_attention(*wide, normalizer=normalizer, **settings)
    truths = torch.autograd.grad(truth, wide, gradient.double())
    pairs = zip((got, *gradients), (truth, *truths), strict=True)
    assert max(relative_error(a, b) for a, b in pairs) <= 1e-2
