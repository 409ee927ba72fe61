"""The bench of sample efficiency: derivatives, losses as defined, rates that are known."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from small_recipe import qbench

from qbench.bench import sample_efficiency as bench
from qbench.bench.sample_efficiency import EXPERTS, Mixture, true_gates

MIXTURES = [
    Mixture(gating=gating, expert=expert, fitted=fitted)
    for gating, expert, fitted in product(("softmax", "sigmoid"), ("ReLU", "linear"), (2, 3))
]


def named(mixture):
    return f"{mixture.gating}-{mixture.expert}-{mixture.fitted}"


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("mixture", MIXTURES, ids=named)
def test_derivatives_are_those_of_autograd(mixture):
    x, parameters = random(5, 2), random(9 * mixture.fitted)
    f, jacobian = mixture.jacobian(x, parameters)
    expected = torch.func.jacrev(lambda one: mixture.values(x, one))(parameters)
    assert torch.allclose(f, mixture.values(x, parameters))
    assert torch.allclose(jacobian, expected)


@pytest.mark.parametrize("expert", ["ReLU", "linear"])
def test_two_sigmoid_gates_hold_the_softmax_truth(expert):
    x = random(50, 2)
    values = [
        one.values(x, one.pack(true_gates(one.gating), EXPERTS))
        for one in MIXTURES
        if one.expert == expert and one.fitted == 2
    ]
    assert torch.allclose(*values)


def test_the_softmax_losses_are_those_of_a_sum_by_hand_and_zero_for_the_same_function():
    three = Mixture(gating="softmax", expert="linear", fitted=3)
    gates, experts = true_gates("softmax")[[0, 1, 1]].clone(), EXPERTS[[0, 1, 1]].clone()
    gates[1:, 5] -= np.log(2)  # the second one in two halves
    moved = gates + random(6)  # the same function
    for one in (gates, moved):
        for loss in bench.softmax_losses(three, three.pack(one, experts)[None]):
            assert loss.item() == pytest.approx(0, abs=1e-12)
    experts[1, 2] += 0.3
    experts[0, 0] += 0.1
    first, second = bench.softmax_losses(three, three.pack(gates, experts)[None])
    assert first.item() == pytest.approx(np.exp(0.5) * 0.1 + 0.5 * 0.3**2)
    assert second.item() == pytest.approx(np.exp(0.5) * 0.1 + 0.5 * 0.3)


def test_the_sigmoid_loss_adds_norms_of_differences():
    two = Mixture(gating="sigmoid", expert="ReLU", fitted=2)
    best = two.pack(true_gates("sigmoid"), EXPERTS)[None]
    off = best.clone()
    off[0, 0:2] += torch.tensor([3.0, 4.0])  # A of the first
    off[0, 11] -= 2.0  # c of the second
    off[0, 12] += 0.5  # α of the first
    assert bench.sigmoid_loss(two, off, best).item() == pytest.approx(5 + 2 + 0.5)


def test_a_known_power_is_found():
    sizes = [500, 1000, 2000, 4000]
    value, low, high = bench.rate(
        sizes, [[3 * n**-0.5 * f for f in (0.9, 1.0, 1.1)] for n in sizes]
    )
    assert value == pytest.approx(-0.5)
    assert low < -0.5 < high


@pytest.mark.slow
def test_as_many_experts_as_the_truth_has_are_found_at_the_parametric_rate(tmp_path, monkeypatch):
    """A quarter of the samples, twice the loss; and what the command writes."""
    monkeypatch.setattr(bench, "SIZES", (500, 2000))
    monkeypatch.setattr(bench, "FITTED", (2,))
    out = tmp_path / "bench.json"
    assert qbench("bench", "sample-efficiency", "--repetitions", "6", "--out", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8
    for row in rows:
        assert max(row["error"]) < 0.04
    losses = np.array([np.mean(row["loss"]) for row in rows]).reshape(4, 2)
    assert (losses[:, 0] / losses[:, 1] > 1.3).all()
    assert "| ReLU" in out.with_suffix(".md").read_text()
    assert b"<svg" in out.with_suffix(".svg").read_bytes()


def test_the_page_has_the_table_of_its_measurements():
    folder = Path(__file__).parents[2] / "results" / "bench"
    found = json.loads((folder / "sample-efficiency.json").read_text())
    page = (folder / "sample-efficiency.md").read_text()
    assert bench.table(found) in page
    assert (folder / "sample-efficiency.svg").is_file()
