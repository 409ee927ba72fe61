"""Measures of attention weights against their definitions on whole matrices, in plain loops."""

import math

import pytest
import torch

from qbench.analysis import attention
from qbench.analysis.attention import (
    GU_LENGTH,
    POSITIONS,
    LayerAttention,
    column_means,
    column_means_gu,
    measure_weights,
    output_ratios,
)
from qbench.attention import reference


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
    ("softpick", 2, 1, 30, None, 1),  # shorter than GU_LENGTH, a query at a time
    ("softmax", 2, 2, 97, 9, 3000),
    ("softpick", 2, 2, 97, 9, 1 << 20),
    ("softpick", 2, 2, 3, None, 1 << 20),  # fewer keys than POSITIONS
]


@pytest.mark.parametrize(("normalizer", "heads", "kv_heads", "length", "window", "chunk"), CASES)
def test_sums_over_chunks_are_those_of_the_whole_matrix(
    normalizer, heads, kv_heads, length, window, chunk, monkeypatch
):
    monkeypatch.setitem(attention.CHUNK_WEIGHTS, "cpu", chunk)
    query, key = tensors(heads, kv_heads, length)
    mask = None if window is None else window_mask(length, window)
    found = measure_weights(
        query, key, normalizer=normalizer, parameters=None, scale=None, mask=mask
    )
    whole = reference.weights(
        query, key, normalizer=normalizer, causal=mask is None, mask=mask
    ).double()
    allowed = window_mask(length, length if window is None else window)[0, 0]
    means, means_gu = (
        function(sums, found.queries)
        for function, sums in ((column_means, found.columns), (column_means_gu, found.columns_gu))
    )
    short = min(length, GU_LENGTH)
    for b in range(2):
        for h in range(heads):
            rows = whole[b, h]
            for k in range(min(POSITIONS, length)):
                assert means[b, h, k] == pytest.approx(sum(rows[:, k].tolist()) / length)
                seen = rows[k:short, k].tolist()
                assert means_gu[b, h, k] == pytest.approx(sum(seen) / len(seen))
            pairs = [
                rows[q, k].item() for q in range(length) for k in range(length) if allowed[q, k]
            ]
            assert found.pairs[b, 0] == len(pairs)
            assert found.zeros[b, h] == sum(weight == 0 for weight in pairs)
            assert found.mass[b, h] == pytest.approx(sum(pairs))
            masses = rows.sum(-1).tolist()
            assert found.silent[b, h] == sum(mass == 0 for mass in masses)
            entropy = 0.0
            for row, mass in zip(rows.tolist(), masses, strict=True):
                entropy -= sum(w / mass * math.log(w / mass) for w in row if w)
            assert found.entropy[b, h] == pytest.approx(entropy, rel=1e-5, abs=1e-5)


def test_softmax_rows_weigh_one_and_have_no_zeros_while_softpick_rows_may_be_silent():
    query, key = tensors(2, 2, 40)
    key[..., 0] += 50  # one large negative product for every query of the first text
    query[0, :, :, 0] = -1
    softmax, softpick = (
        measure_weights(query, key, normalizer=name, parameters=None, scale=None, mask=None)
        for name in ("softmax", "softpick")
    )
    assert torch.allclose(softmax.mass, torch.full((2, 2), 40.0, dtype=torch.float64))
    assert softmax.zeros.sum() == 0
    assert (softpick.silent[0] > 30).all()
    assert (softpick.zeros[0] / softpick.pairs[0] > 0.9).all()


def test_a_head_without_any_weight_has_no_entropy_and_no_output():
    query, key = tensors(2, 2, 20)
    query, key = -query.abs(), key.abs()
    query[:, 1], key[:, 1] = query[:, 1].abs(), key[:, 1]
    weights = measure_weights(
        query, key, normalizer="softpick", parameters=None, scale=None, mask=None
    )
    output = torch.ones(2, 20, 2, 8)
    output[:, :, 0] = 0
    layer = LayerAttention()
    layer.add(weights, output)
    assert layer.of("silent")[:, 0].tolist() == [1.0, 1.0]
    assert layer.of("entropy")[:, 0].isnan().all()
    assert not layer.of("entropy")[:, 1].isnan().any()
    assert layer.of("output").tolist() == [[0.0, 2.0], [0.0, 2.0]]


def test_output_ratios_are_mean_norms_over_their_layers_mean():
    output = torch.zeros(1, 2, 2, 2)
    output[0, :, 0] = torch.tensor([[3.0, 4.0], [0.0, 1.0]])  # norms 5 and 1
    output[0, :, 1] = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # norms 1 and 0
    assert output_ratios(output)[0].tolist() == pytest.approx([3 / 1.75, 0.5 / 1.75])
    assert output_ratios(torch.zeros(1, 2, 2, 2)).tolist() == [[0.0, 0.0]]
