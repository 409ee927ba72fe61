"""Kurtosis against scipy and plain loops; massive activations where they were put."""

import numpy as np
import pytest
import torch
from scipy import stats

from qbench.analysis.hidden import LEVELS, MASSIVE_KEPT, Massive, States, counts, quantiles, summary


def states(seed=0, shape=(3, 17, 24)):
    draw = np.random.default_rng(seed)
    values = draw.standard_t(5, shape) * np.exp(draw.normal(size=shape[-1])) + 0.3
    return torch.tensor(values, dtype=torch.float32)


def seen(*layers, batch=2):
    """States of layers, each taken in ``batch`` texts at a time."""
    result = []
    for index, layer in enumerate(layers):
        one = States()
        for first in range(0, len(layer), batch):
            one.add(layer[first : first + batch], layer=index, first=first)
        result.append(one)
    return result


def test_kurtosis_of_all_values_at_once_is_scipys_over_all_layers():
    layers = states(0), 3 * states(1) + 1
    pooled = np.concatenate([layer.double().numpy().ravel() for layer in layers])
    expected = stats.kurtosis(pooled, fisher=False)
    assert summary(seen(*layers)).kurtosis == pytest.approx(expected, rel=1e-9)


def test_extremes_and_medians_are_of_each_text():
    layer = states()
    layer[1] *= 10
    texts = layer.double().flatten(1).numpy()
    medians = [np.sort(np.abs(text))[(text.size - 1) // 2] for text in texts]
    result = summary(seen(layer))
    assert result.minimum == texts.min()
    assert result.maximum == texts.max()
    assert result.median == pytest.approx(np.median(medians))
    ratios = [np.abs(text).max() / median for text, median in zip(texts, medians, strict=True)]
    assert result.largest_to_median == pytest.approx(max(ratios))


@pytest.mark.parametrize(
    ("value", "scale", "massive"),
    [
        (-101.0, 0.05, True),
        (99.0, 0.05, False),  # not above 100
        (500.0, 1.0, False),  # not 1,000 times the median
        (5000.0, 1.0, True),
    ],
)
def test_an_activation_is_massive_above_100_and_1000_medians(value, scale, massive):
    layer = torch.full((3, 17, 24), scale)
    layer[2, 5, 7] = value
    one = States()
    assert one.add(layer[:2], layer=4, first=0) == []
    result = one.add(layer[2:], layer=4, first=2)
    assert one.massive == massive
    expected = [Massive(value, pytest.approx(abs(value) / scale), 4, 2, 5, 7)]
    assert result == (expected if massive else [])


def test_of_many_massive_activations_the_largest_are_kept_and_all_are_counted():
    layer = torch.full((1, 100, 100), 0.01)
    layer[0, :2] = torch.arange(200.0, 400.0).reshape(2, 100)
    one = States()
    result = one.add(layer, layer=0, first=0)
    assert one.massive == 200
    assert sorted(one.value for one in result) == list(range(400 - MASSIVE_KEPT, 400))


# Quantiles from counts of bit patterns against sorted values.


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
