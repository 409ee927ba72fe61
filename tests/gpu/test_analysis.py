"""Analyses on a GPU: figures as on the CPU."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import load_model

from qbench.analysis.measure import measure
from qbench.analysis.sensitivity import Baseline
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.quantizers.linear import linears

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_a_gpu_measures_what_a_cpu_measures(normalizer):
    checkpoint = find(str(DEMO / normalizer))
    tokenizer = load_tokenizer(checkpoint)
    ids = torch.randint(3, 400, (4, 200), generator=torch.Generator().manual_seed(0))
    actual = []
    for device in ("cpu", "cuda"):
        model = load_model(checkpoint, dtype=torch.float32, device=device, attention="reference")
        names = list(linears(model))
        actual.append(measure(model, ids, tokenizer=tokenizer, linears=names, batch=2))
    ours, theirs = actual
    assert theirs.perplexity == pytest.approx(ours.perplexity, rel=1e-4)
    assert theirs.zeros == pytest.approx(ours.zeros, abs=1e-3)
    assert theirs.sinks[0].rates_gu == pytest.approx(ours.sinks[0].rates_gu, abs=0.05)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert other.hidden.kurtosis == pytest.approx(one.hidden.kurtosis, rel=1e-3)
        assert other.hidden.quantiles == pytest.approx(one.hidden.quantiles, rel=1e-2, abs=1e-3)
        assert other.hidden.maximum == pytest.approx(one.hidden.maximum, rel=1e-3)
        masses = [[head.mass for head in layer.heads] for layer in (one, other)]
        assert masses[1] == pytest.approx(masses[0], rel=1e-3)
    for one, other in zip(ours.inputs, theirs.inputs, strict=True):
        assert other.rms == pytest.approx(one.rms, rel=2e-2)
    stretches = [[part.loss for part in each.stretches] for each in actual]
    assert stretches[1] == pytest.approx(stretches[0], rel=1e-4)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_a_layer_alone_costs_on_a_gpu_what_it_costs_on_a_cpu(normalizer):
    checkpoint = find(str(DEMO / normalizer))
    ids = torch.randint(3, 400, (5, 100), generator=torch.Generator().manual_seed(0))
    actual = {}
    for device, dtype in (
        ("cpu", torch.float32),
        ("cuda", torch.float32),
        ("cuda", torch.bfloat16),
    ):
        attention = "reference" if dtype == torch.float32 else "triton"
        model = load_model(checkpoint, dtype=dtype, device=device, attention=attention)
        baseline = Baseline(model, ids, batch=2)
        assert baseline.skips, (device, dtype)
        variants = []
        for name, layer in linears(model).items():
            if baseline.block_of(name) == 1:
                changed = copy.deepcopy(layer)
                changed.weight.data.mul_(1.1)
                variants.append({name: changed})
        together = baseline.losses(*variants)[:, 0]
        baseline.skips = False
        actual[device, dtype] = together, baseline.losses(*variants)[:, 0]
    (expected, _), *on_gpu = actual.values()
    for together, alone in on_gpu:
        assert together == pytest.approx(alone, rel=1e-2, abs=2e-3)
        assert together.mean() == pytest.approx(alone.mean(), rel=5e-2)
    np.testing.assert_allclose(on_gpu[0][0], expected, rtol=1e-3, atol=1e-6)
