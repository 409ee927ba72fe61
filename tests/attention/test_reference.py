from functools import partial

import pytest
import torch
from attention_cases import NORMALIZERS, QUICK, WHOLE, Case, attended, definition, errors, inputs
from attention_cases import parameters as parameters_of
from normalizer_parameters import parameters

from qbench.attention import kernels, reference
from qbench.attention.kernels.varlen import packed_bounds


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in WHOLE)], ids=str
)
def test_output_and_gradients_are_the_papers_formulas(case, monkeypatch):
    """In float64, in chunks of few queries."""
    monkeypatch.setattr(reference, "CHUNK_SCORES", 512)
    actual = errors(case, partial(attended, reference), torch.float64)
    lone = case.shape[4] == 1 or case.window == 1
    if lone and "softpick" not in case.normalizer:  # the weight of a single key has no gradient
        actual = {name: actual[name] for name in ("output", "dv")}
    of_parameters = 1e-6  # which are float32
    limits = dict.fromkeys(("output", "dq", "dk", "dv"), 1e-9)
    assert {n: e for n, e in actual.items() if not e <= limits.get(n, of_parameters)} == {}


@pytest.mark.parametrize("at_bound", [0.0, 1.0])  # torch 2.14's clamp, and earlier ones'
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_gradients_are_finite_differences_where_one_key_has_all_the_weight(
    normalizer, at_bound, monkeypatch
):
    """The first query sees one key, with a score of 0.01; the others have a hard sink."""

    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, low):
            ctx.save_for_backward((x > low) + at_bound * (x == low))
            return x.maximum(x.new_full((), low))

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    monkeypatch.setattr(torch.Tensor, "clamp", lambda x, min: Clamp.apply(x.double(), min))
    query, key, value, _ = inputs(Case(normalizer=normalizer, shape=(1, 1, 1, 4, 4, 4)))
    query[:, :, :] = key[:, :, 0] / key[:, :, 0].square().sum() * 2
    query *= torch.tensor([0.01, 30, 60, 90])[:, None]
    given = {name: tensor[:1].double() for name, tensor in parameters(normalizer, 1).items()}
    query, key, value = (tensor.double() for tensor in (query, key, value))

    def attend(query):
        return reference.attention(
            query, key, value, normalizer=normalizer, parameters=given, causal=True
        )

    assert torch.autograd.gradcheck(attend, query.requires_grad_(), atol=1e-9, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.3, 40.0])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_inference_and_autograd_compute_the_same_in_float32(normalizer, scale):
    case = Case(normalizer=normalizer, shape=(2, 2, 2, 40, 40, 16))
    query, key, value, _ = inputs(case)
    settings = {"normalizer": normalizer, "causal": True, "scale": scale}
    settings["parameters"] = parameters_of(case)
    plain = reference.attention(query, key, value, **settings)
    tracked = reference.attention(query.clone().requires_grad_(), key, value, **settings)
    torch.testing.assert_close(plain, tracked.detach(), rtol=1e-4, atol=1e-5)
    if scale < 1:
        wide = [tensor.double() for tensor in (query * scale * 4, key, value)]
        given = {name: tensor.double() for name, tensor in parameters_of(case).items()}
        truth = definition(case, *wide, given)
        torch.testing.assert_close(plain.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(1, 1, 21, 37), "must be bool"),
        (torch.ones(1, 1, 21, 36, dtype=torch.bool), "does not fit"),
        (torch.ones(21, 37, dtype=torch.bool), "does not fit"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    query, key, value, _ = inputs(QUICK[0])
    with pytest.raises(ValueError, match=message):
        reference.attention(query, key, value, normalizer="softpick", mask=mask)


def test_a_mask_beside_spans_is_refused():
    """It was left out without a word."""
    pytest.importorskip("triton")
    query, key, value, _ = inputs(QUICK[0])
    seq_bounds = torch.tensor([[0, 0, 9, 0, 9, 0], [1, 0, 9, 0, 9, 0]], dtype=torch.int32)
    mask = torch.ones(1, 1, 21, 37, dtype=torch.bool)
    for by in (kernels, reference):
        with pytest.raises(ValueError, match="mask and seq_bounds both say which keys"):
            by.attention(query, key, value, normalizer="softpick", mask=mask, seq_bounds=seq_bounds)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick", "rectified"])
@pytest.mark.parametrize("length", [427, 100])
def test_the_layout_of_the_inputs_changes_no_bit(normalizer, length):
    """With a cache keys come contiguous, without one as views; scores must not depend on it."""
    case = Case(normalizer=normalizer, shape=(2, 3, 3, length, length, 64))
    views = inputs(case)[:3]
    expected = reference.attention(*views, normalizer=normalizer, causal=True)
    dense = [view.contiguous() for view in views]
    for given in (dense, (views[0], *dense[1:])):
        assert torch.equal(
            reference.attention(*given, normalizer=normalizer, causal=True), expected
        )


# Queries and keys: parts of sequences, whole ones, some of one size, without either, more queries.
SIZES = [(3, 17), (9, 9), (1, 20), (5, 18), (2, 0), (9, 9), (30, 30), (12, 12), (4, 2), (0, 3)]


@pytest.mark.parametrize("normalizer", ["softpick", "scalable-softmax"])
def test_sequences_side_by_side_are_as_one_by_one(normalizer):
    """Output and gradients, of grouped heads; queries without keys give 0."""
    edges = torch.tensor([(0, 0), *SIZES]).cumsum(0)
    shape = (1, 4, 2, *edges[-1].tolist(), 8)
    case = Case(normalizer=normalizer, shape=shape, slopes=True)
    *tensors, gradient = inputs(case, torch.float64)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    settings = {"causal": True, "normalizer": normalizer, "window": 4}
    settings["parameters"] = parameters_of(case)
    alone = [
        reference.attention(q, k, v, **settings) if q.shape[2] and k.shape[2] else q * 0
        for q, k, v in zip(
            query.split([size[0] for size in SIZES], 2),
            *(tensor.split([size[1] for size in SIZES], 2) for tensor in (key, value)),
            strict=True,
        )
    ]
    together = reference.attention(
        query, key, value, seq_bounds=packed_bounds(*edges.T), **settings
    )
    actual, expected = (
        (output, *torch.autograd.grad(output, (query, key, value), gradient))
        for output in (together, torch.cat(alone, 2))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
