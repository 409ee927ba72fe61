"""Weights of one row of scores: their derivative, and scores far apart, far below 0 or near it."""

import math

import pytest
import torch
from normalizer_parameters import parameters

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.normalizers.softpick import EPSILON


def normalize(scores, normalizer):
    """Of scores [N], as one head's."""
    given = parameters(normalizer, 1, dtype=scores.dtype)
    return NORMALIZERS.get(normalizer).weights(scores[None, None], parameters=given)[0, 0]


def test_the_jacobian_of_softpick_is_equation_7():
    x = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    s = normalize(x, "softpick")
    m = max(0.0, x.max().item())
    e = torch.exp(x - m)
    total = (e - math.exp(-m)).abs().sum() + EPSILON
    sign = torch.where(x < 0, -1.0, 1.0).double()
    expected = torch.diag((x > 0) * e / total) - torch.outer(s, sign * e / total)
    got = torch.autograd.functional.jacobian(lambda y: normalize(y, "softpick"), x)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_masked_score_may_be_far_above_the_others():
    """As ALiBi makes keys that come later; e to such a difference is infinite."""
    scores = torch.tensor([[1.0, 2.0, 1e4]], requires_grad=True)
    allowed = torch.tensor([[True, True, False]])
    w = NORMALIZERS.get("softpick").weights(scores, allowed=allowed, parameters={})
    (gradient,) = torch.autograd.grad(w[0, 1], scores)
    assert w[0, 2] == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize("scores", ["all negative", "zeros", "huge", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_give_finite_weights_and_gradients(normalizer, scores, dtype):
    x = torch.linspace(-1, 1, 40, dtype=dtype)
    x = {"all negative": x - 120, "zeros": x * 0, "huge": x * 1e4, "tiny": x * 1e-30}[scores]
    x.requires_grad_()
    w = normalize(x, normalizer)
    (gradient,) = torch.autograd.grad((w * torch.arange(40)).sum(), x)
    assert w.isfinite().all()
    assert gradient.isfinite().all()
    assert w.sum() <= (40 if normalizer == "sigmoid" else 1) + 1e-5


def test_softpick_keeps_its_precision_where_all_scores_are_near_zero():
    x = torch.tensor([1e-5, -2e-5, 3e-5, -4e-5], dtype=torch.float64)
    total = torch.expm1(x).abs().sum() + EPSILON * x.max().exp()
    expected = torch.expm1(x).relu() / total
    torch.testing.assert_close(normalize(x, "softpick"), expected, rtol=1e-12, atol=0)
    got = normalize(x.float(), "softpick").double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_first_keys_below_minus_88_do_not_overflow():
    x = torch.tensor([-120.0, -110.0, 1.0, 2.0])
    e1, e2 = math.e - 1, math.e**2 - 1
    expected = (2 * e1 + 3 * e2) / (e1 + e2 + 2)  # values 1, 1, 2, 3
    got = normalize(x, "softpick") @ torch.tensor([1.0, 1.0, 2.0, 3.0])
    assert got.item() == pytest.approx(expected, rel=1e-5)
