"""The kernels' assembly computes what it says, as closely as it says."""

import numpy as np
import pytest
from ptx import run

from qbench.attention.kernels import sigmoid, softcap

LANES = 16


def by_lanes(assembly, scores):
    """Of scores [threads, LANES], the results [threads, LANES]."""
    return np.stack(run(assembly.value, LANES, list(scores.T)), 1)


def spread(low, high, threads=4001):
    """Evenly, and never the same number in two of a thread's lanes."""
    return np.linspace(low, high, threads * LANES, dtype=np.float32).reshape(threads, LANES)


def largest(got, truth):
    return float(np.max(np.abs(got.astype(np.float64) / truth - 1)))


ODD = [-68.4, -100, -140, -3000, -1e9, -1e30, -np.inf, -5, -4.5, -3, 0, 40, 1e9, np.inf]


@pytest.mark.parametrize("odd", ODD)
def test_one_odd_score_of_a_thread_is_right_in_every_lane(odd):
    z = np.full((LANES, LANES), -9.0, np.float32)
    np.fill_diagonal(z, odd)
    truth = 1 / (1 + np.exp2(np.minimum(-z.astype(np.float64), 1000)))
    got = by_lanes(sigmoid.RARE_ASSEMBLY, z)
    assert np.max(np.abs(got - truth) / np.maximum(truth, 1e-30)) <= 1e-3


def test_what_is_no_number_stays_none():
    z = np.full((LANES, LANES), -9.0, np.float32)
    np.fill_diagonal(z, np.nan)
    got = by_lanes(sigmoid.RARE_ASSEMBLY, z)
    assert (np.isnan(got) == np.eye(LANES, dtype=bool)).all()


@pytest.mark.parametrize(
    ("assembly", "low", "high", "limit"),
    [
        (sigmoid.RARE_ASSEMBLY, -100, -5.01, 1e-3),
        (sigmoid.RARE_ASSEMBLY, -4.9, 100, 1e-5),
    ],
)
def test_reciprocals_where_they_are_needed(assembly, low, high, limit):
    z = spread(low, high)
    assert largest(by_lanes(assembly, z), 1 / (1 + np.exp2(-z.astype(np.float64)))) <= limit


@pytest.mark.parametrize(("inner", "factor"), [(0.125 / 50, 72.1), (0.0884 / 15, 1.0)])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-0.353, 0.353), (-6.0, 6.0), (0.3, 0.4)])
def test_tanh_near_zero(low, high, gradient, inner, factor):
    x = spread(low, high)
    x = x[np.abs(x).min(1) > 1e-6]
    level = np.float32(3.5 if gradient else 0.0)
    inner, square = np.float32(inner), np.float32(inner) ** 2
    limit, c0, c1, d0, d1 = (
        each.value for each in (softcap.LIMIT, softcap.C0, softcap.C1, softcap.D0, softcap.D1)
    )
    scalars = [-limit / square, c0 * inner * factor, c1 * inner * square * factor, d0]
    scalars += [d1 * square, inner, factor]
    given = list((x / inner).T) + [level] * (LANES * gradient)
    given += [scalar for scalar in scalars for _ in range(LANES)]
    text = (softcap.BOTH if gradient else softcap.VALUE).value
    results = run(text, LANES * (1 + gradient), given)
    tanh = np.tanh(x.astype(np.float64))
    values = np.stack(results[:LANES], 1).astype(np.float64) + level
    rounding = 5e-7 * (factor + level)
    assert np.max(np.abs(values - factor * tanh) - 3e-4 * np.abs(factor * tanh)) <= rounding
    if gradient:
        slopes = np.stack(results[LANES:], 1)
        assert np.max(np.abs(slopes - (1 - tanh**2))) <= 1.3e-3


@pytest.mark.parametrize(("inner", "factor"), [(0.125 / 50, 72.13), (0.0884 / 15, 21.64)])
@pytest.mark.parametrize(("low", "high"), [(-0.353, 0.353), (-6.0, 6.0), (0.3, 0.4)])
def test_exponentials_of_capped_scores(low, high, inner, factor):
    lanes = softcap.MORE_LANES
    x = np.linspace(low, high, 2001 * lanes, dtype=np.float32).reshape(-1, lanes)
    inner, square = np.float32(inner), np.float32(inner) ** 2
    limit, c0, c1 = (each.value for each in (softcap.LIMIT, softcap.C0, softcap.C1))
    scalars = [-limit / square, c0 * inner * factor, c1 * inner * square * factor, inner, factor]
    given = list((x / inner).T) + [scalar for scalar in scalars for _ in range(lanes)]
    got = np.stack(run(softcap.EXPONENTIAL.value, lanes, given), 1).astype(np.float64)
    tanh = np.tanh(x.astype(np.float64))
    wrong = np.abs(np.log2(got) - factor * tanh)  # of the exponents
    assert np.max(wrong - 3e-4 * np.abs(factor * tanh)) <= 1e-5 * factor
