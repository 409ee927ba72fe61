"""Quantiles from counts of bit patterns against sorted values."""

import numpy as np
import pytest
import torch

from qbench.analysis.hidden import LEVELS, counts, quantiles


def values(seed=0, size=9973):
    draw = np.random.default_rng(seed)
    return torch.tensor(draw.standard_t(2, size) * 10.0 ** draw.integers(-3, 3, size))


def at(ordered, level):
    """The value that a share ``level`` of them is no larger than."""
    return ordered[int(np.ceil(level * len(ordered))) - 1]


def test_of_bfloat16_they_are_values_of_the_sorted_sample():
    sample = values().bfloat16()
    sample[:5] = -0.0
    result = quantiles(counts(sample[:5000]) + counts(sample[5000:]), exact=True)
    ordered = np.sort(sample.float().numpy())
    assert result == {str(level): at(ordered, level) for level in LEVELS}


def test_of_float32_they_are_within_four_thousandths():
    sample = values(1).float()
    result = quantiles(counts(sample), exact=False)
    ordered = np.sort(sample.numpy())
    for level in LEVELS:
        assert result[str(level)] == pytest.approx(at(ordered, level), rel=4e-3)
