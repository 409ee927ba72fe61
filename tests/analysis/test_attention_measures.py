"""Measures of attention weights against their definitions on whole matrices, in plain loops."""

import numpy as np
import pytest
import torch
from attention_cases import weights as weights_of
from normalizer_parameters import parameters
from scipy import stats

from qbench.analysis import attention_weights as attention
from qbench.analysis.attention_weights import Call, chunks, measure_weights, measures
from qbench.analysis.hidden import LEVELS, MASSIVE_KEPT, Massive, States, counts, quantiles, summary
from qbench.attention.normalizers import NORMALIZERS


def tensors(heads, kv_heads, length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, length, 8, generator=draw) * 2
    return query, torch.randn(2, kv_heads, length, 8, generator=draw)


def window_mask(length, window):
    position = torch.arange(length)
    behind = position[:, None] - position
    return ((behind >= 0) & (behind < window))[None, None]


CASES = [
    ("softmax", 4, 4, 97, None, 1 << 20),
    ("softmax", 4, 2, 97, None, 3000),  # several chunks, keys shared by heads
    ("softpick", 4, 4, 97, None, 3000),
    ("softpick", 2, 1, 30, None, 1),  # shorter than attention.GU_LENGTH, a query at a time
    ("softmax", 2, 2, 97, 9, 3000),
    ("softpick", 2, 2, 97, 9, 1 << 20),
    ("softpick", 2, 2, 3, None, 1 << 20),  # fewer keys than attention.POSITIONS
]


@pytest.mark.parametrize(("normalizer", "heads", "kv_heads", "length", "window", "chunk"), CASES)
def test_sums_over_chunks_are_those_of_the_whole_matrix(
    normalizer, heads, kv_heads, length, window, chunk, monkeypatch
):
    monkeypatch.setitem(attention.CHUNK_WEIGHTS, "cpu", chunk)
    query, key = tensors(heads, kv_heads, length)
    mask = None if window is None else window_mask(length, window)
    result = measure_weights(Call(query=query, key=key, normalizer=normalizer, mask=mask))
    whole = weights_of(query, key, normalizer=normalizer, causal=mask is None, mask=mask).double()
    allowed = window_mask(length, window or length)[0, 0]
    mass, first = whole.sum(-1), whole[..., : min(length, attention.GU_LENGTH), :]
    share = whole / mass[..., None]
    expected = {
        "zeros": ((whole == 0) & allowed).sum((2, 3)) / allowed.sum(), "mass": mass,
        "largest": whole.amax(-1), "columns": whole.sum(2),
        "entropy": -torch.special.xlogy(share, share).sum(-1),  # NaN of a row without weight
    }  # fmt: skip
    for name, values in expected.items():
        measured = result[name].double()
        torch.testing.assert_close(measured, values.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
    keys = range(min(attention.POSITIONS, length))
    means = attention.column_means(result["columns"], length).double()[..., : len(keys)]
    values = torch.stack([whole[..., k].mean(-1) for k in keys], -1)
    torch.testing.assert_close(means, values, rtol=1e-6, atol=1e-9)
    means = attention.column_means_gu(result["columns_gu"], length).double()[..., : len(keys)]
    values = torch.stack([first[..., k:, k].mean(-1) for k in keys], -1)
    torch.testing.assert_close(means, values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("normalizer", [*NORMALIZERS])
@pytest.mark.parametrize("options", ["", "slopes", "softcap"])
def test_every_normalizer_is_measured_by_its_definition(normalizer, options, monkeypatch):
    monkeypatch.setitem(attention.CHUNK_WEIGHTS, "cpu", 2 * 4 * 40 * 7)
    query, key = tensors(4, 2, 40)
    given = parameters(normalizer, 4, dtype=torch.float32, slopes=options == "slopes")
    softcap = 3.0 if options == "softcap" else None
    settings = {"normalizer": normalizer, "parameters": given, "softcap": softcap}
    whole = weights_of(query, key, causal=True, **settings)
    result = measure_weights(Call(query=query, key=key, **settings))
    assert torch.allclose(result["mass"], whole.sum(-1), rtol=1e-4, atol=1e-6)
    assert torch.allclose(result["largest"], whole.amax(-1), rtol=1e-4, atol=1e-6)
    assert torch.allclose(result["columns"].float(), whole.sum(2), rtol=1e-4, atol=1e-5)
    rows = torch.cat(
        [torch.nn.functional.pad(part, (0, 40 - part.shape[-1])) for part, _ in
         chunks(Call(query=query, key=key, **settings))], 2,
    )  # fmt: skip
    assert torch.allclose(rows, whole, rtol=1e-4, atol=1e-6)


def test_a_head_without_any_weight_has_no_entropy_and_no_output():
    query, key = tensors(2, 2, 20)
    query, key = -query.abs(), key.abs()
    query[:, 1], key[:, 1] = query[:, 1].abs(), key[:, 1]
    weights = measure_weights(Call(query=query, key=key, normalizer="softpick"))
    output = torch.ones(2, 20, 2, 8)
    output[:, :, 0] = 0
    result = measures(weights, output, stretch=8)
    assert result["silent"][:, 0].tolist() == [1.0, 1.0]
    assert result["entropy"][:, 0].isnan().all()
    assert not result["entropy"][:, 1].isnan().any()
    assert result["output"].tolist() == [[0.0, 2.0], [0.0, 2.0]]


def test_stretches_are_means_over_their_own_queries():
    query, key = tensors(2, 2, 20)
    weights = measure_weights(Call(query=query, key=key, normalizer="softpick"))
    result = measures(weights, torch.ones(2, 20, 2, 8), stretch=8)
    assert result["mass_stretch"].shape == (2, 2, 3)
    last = weights["mass"][1, 0, 16:].mean().item()
    assert result["mass_stretch"][1, 0, 2].item() == pytest.approx(last)
    assert result["mass"][1, 0].item() == pytest.approx(weights["mass"][1, 0].mean().item())


# Kurtosis against scipy and plain loops; massive activations where they were put.


def states(seed=0, shape=(3, 17, 24)):
    draw = np.random.default_rng(seed)
    values = draw.standard_t(5, shape) * np.exp(draw.normal(size=shape[-1])) + 0.3
    return torch.tensor(values, dtype=torch.float32)


def seen(*layers, batch=2):
    """States of layers, each taken in ``batch`` texts at a time."""
    result = []
    for index, layer in enumerate(layers):
        states = States()
        for first in range(0, len(layer), batch):
            states.add(layer[first : first + batch], layer=index, first=first)
        result.append(states)
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
    states = States()
    assert states.add(layer[:2], layer=4, first=0) == []
    result = states.add(layer[2:], layer=4, first=2)
    assert states.massive == massive
    expected = [Massive(value, pytest.approx(abs(value) / scale), 4, 2, 5, 7)]
    assert result == (expected if massive else [])


def test_of_many_massive_activations_the_largest_are_kept_and_all_are_counted():
    layer = torch.full((1, 100, 100), 0.01)
    layer[0, :2] = torch.arange(200.0, 400.0).reshape(2, 100)
    states = States()
    result = states.add(layer, layer=0, first=0)
    assert states.massive == 200
    assert sorted(massive.value for massive in result) == list(range(400 - MASSIVE_KEPT, 400))


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
