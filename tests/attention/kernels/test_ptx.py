"""The kernels' assembly computes what it says, as closely as it says."""

import numpy as np
import pytest
from ptx import run

from qbench.attention.kernels import ptx as kernels_ptx

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
    got = by_lanes(kernels_ptx.SIGMOIDS, z)
    assert np.max(np.abs(got - truth) / np.maximum(truth, 1e-30)) <= 1e-3


def test_what_is_no_number_stays_none():
    z = np.full((LANES, LANES), -9.0, np.float32)
    np.fill_diagonal(z, np.nan)
    got = by_lanes(kernels_ptx.SIGMOIDS, z)
    assert (np.isnan(got) == np.eye(LANES, dtype=bool)).all()


@pytest.mark.parametrize(
    ("assembly", "low", "high", "limit"),
    [
        (kernels_ptx.SIGMOIDS, -100, -5.01, 1e-3),
        (kernels_ptx.SIGMOIDS, -4.9, 100, 1e-5),
    ],
)
def test_reciprocals_where_they_are_needed(assembly, low, high, limit):
    z = spread(low, high)
    assert largest(by_lanes(assembly, z), 1 / (1 + np.exp2(-z.astype(np.float64)))) <= limit


@pytest.mark.parametrize(("inner", "factor"), [(0.125 / 50, 72.1), (0.0884 / 15, 1.0)])
@pytest.mark.parametrize(("low", "high"), [(-0.353, 0.353), (-6.0, 6.0), (0.3, 0.4)])
def test_tanh_of_what_is_mostly_small(low, high, inner, factor):
    x = spread(low, high)
    x = x[np.abs(x).min(1) > 1e-6]
    inner, square = np.float32(inner), np.float32(inner) ** 2
    limit, c0, c1 = (each.value for each in (kernels_ptx.LIMIT, kernels_ptx.C0, kernels_ptx.C1))
    scalars = [-limit / square, c0 * inner * factor, c1 * inner * square * factor, inner, factor]
    given = list((x / inner).T) + [scalar for scalar in scalars for _ in range(LANES)]
    results = run(kernels_ptx.TANHS.value, LANES, given)
    tanh = np.tanh(x.astype(np.float64))
    values = np.stack(results, 1).astype(np.float64)
    wrong = np.abs(values - factor * tanh) - 3e-4 * np.abs(factor * tanh)
    assert np.max(wrong) <= 5e-7 * factor
