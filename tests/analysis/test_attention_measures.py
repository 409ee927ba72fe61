"""Measures of attention weights against their definitions on whole matrices, in plain loops."""

import math

import pytest
import torch
from attention_cases import weights as weights_of
from normalizer_parameters import parameters

from qbench.analysis import attention_weights as attention
from qbench.analysis.attention_weights import (
    GU_LENGTH,
    POSITIONS,
    Call,
    chunks,
    column_means,
    column_means_gu,
    measure_weights,
    measures,
)
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
    result = measure_weights(Call(query=query, key=key, normalizer=normalizer, mask=mask))
    whole = weights_of(query, key, normalizer=normalizer, causal=mask is None, mask=mask).double()
    allowed = window_mask(length, length if window is None else window)[0, 0]
    means, means_gu = (
        function(result[name], length)
        for function, name in ((column_means, "columns"), (column_means_gu, "columns_gu"))
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
            zeros = sum(weight == 0 for weight in pairs) / len(pairs)
            assert result["zeros"][b, h].item() == pytest.approx(zeros, abs=1e-6)
            masses = rows.sum(-1).tolist()
            assert result["mass"][b, h].tolist() == pytest.approx(masses, rel=1e-5)
            assert result["largest"][b, h].tolist() == pytest.approx(
                rows.amax(-1).tolist(), rel=1e-5
            )
            assert result["columns"][b, h].tolist() == pytest.approx(rows.sum(0).tolist(), rel=1e-5)
            entropies = [
                -sum(w / mass * math.log(w / mass) for w in row if w) if mass else math.nan
                for row, mass in zip(rows.tolist(), masses, strict=True)
            ]
            assert result["entropy"][b, h].tolist() == pytest.approx(
                entropies, rel=1e-5, abs=1e-5, nan_ok=True
            )


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
