"""Damage against what the whole distributions and hand-made tables say."""

from __future__ import annotations

import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scoring_models import choices, instance, llama, pages, scorer, text

from qbench.errors import EvaluationError, ResultsError
from qbench.evaluation.damage import (
    Outcomes,
    answer_change,
    damage,
    distributions,
    flips,
    perplexity_ratio,
)
from qbench.evaluation.scoring.distributions import Base, Meter, Recorder
from qbench.record import Flips, Score


def quantized_like(model: torch.nn.Module, noise: float) -> torch.nn.Module:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.model.layers.parameters():
        parameter.data += (
            noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
        )
    return other


class Everything:
    """An observer that keeps whole distributions by (request, place), in float64."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, instances, lengths) -> None:
        self.lengths = list(lengths)

    def observe(self, scored, log_probabilities) -> None:
        for row, request, place in zip(scored.row, scored.request, scored.place, strict=True):
            self.rows[int(request), int(place)] = log_probabilities[row].double().clone()

    def end(self) -> None:
        keys = [(r, p) for r, length in enumerate(self.lengths) for p in range(length)]
        assert sorted(self.rows) == keys
        self.table = torch.stack([self.rows[key] for key in keys])


def watch(model, observer, requests, mode="exact"):
    lm = scorer(model, mode, max_length=96, observer=observer, sample=2)
    if requests[0].request_type == "loglikelihood":
        return lm.loglikelihood(requests, disable_tqdm=True)
    return lm.loglikelihood_rolling(requests, disable_tqdm=True)


def measured(requests, *, noise, modes=("exact", "exact"), top=24):
    model = llama()
    recorder = Recorder(top=top)
    watch(model, recorder, requests, modes[0])
    meter = Meter(recorder.base("k"))
    watch(quantized_like(model, noise), meter, requests, modes[1])
    (result,) = meter.measured.values()
    return result


REQUESTS = {
    "choices": choices(13),
    "windows": pages((30, 0, 200, 1)),
    "one token": [instance(text(i, 5), " the", i) for i in range(9)],
}


@pytest.mark.parametrize("modes", [("exact", "exact"), ("fast", "exact"), ("exact", "fast")])
@pytest.mark.parametrize("kind", REQUESTS)
def test_an_unchanged_model_has_no_damage(kind, modes):
    result = measured(REQUESTS[kind], noise=0.0, modes=modes)
    assert np.abs(result.kl).max() < 1e-4
    assert result.agrees.all()
    assert np.abs(result.change).max() < 1e-4


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_with_every_entry_kept_it_is_the_whole_divergence(kind, mode):
    requests, model = REQUESTS[kind], llama()
    other = quantized_like(model, 0.3)
    ours = measured(requests, noise=0.3, modes=(mode, mode), top=400)
    before, after = Everything(), Everything()
    watch(model, before, requests)
    watch(other, after, requests)
    p, q = before.table, after.table
    expected = (p.exp() * (p - q)).sum(-1)
    assert expected.mean() > 0.01
    np.testing.assert_allclose(ours.kl, expected.numpy(), atol=1e-3, rtol=6e-3)  # float16
    assert (ours.agrees == (p.argmax(-1) == q.argmax(-1)).numpy()).all()


def test_percentiles_are_in_order_and_the_change_is_the_scores():
    requests = REQUESTS["choices"]
    result = measured(requests, noise=0.3)
    report = distributions(result)
    kl = report.kl
    assert 0 < kl.median < kl.p90 < kl.p99 < kl.p99_9 <= kl.largest
    before = watch(llama(), None, requests)
    after = watch(quantized_like(llama(), 0.3), None, requests)
    total = sum(a for a, _ in after) - sum(b for b, _ in before)
    assert report.target_change.value * report.tokens == pytest.approx(total, abs=1e-2)
    assert report.target_change.documents == 13


def test_a_base_comes_back_from_its_file(tmp_path):
    recorder = Recorder()
    for requests in (choices(5, task="a"), choices(3, seed=9, task="b")):
        watch(llama(), recorder, requests)
    path = tmp_path / "base.safetensors"
    recorder.base("key of the cell").save(path)
    back = Base.load(path, "key of the cell")
    assert list(back.tasks) == ["a", "b"]
    for task, base in recorder.base("key of the cell").tasks.items():
        for name in base.__slots__:
            np.testing.assert_array_equal(getattr(back.tasks[task], name), getattr(base, name))
    assert path.stat().st_size < 200 * sum(len(b.target) for b in back.tasks.values()) + 100_000
    with pytest.raises(ResultsError, match="of another cell"):
        Base.load(path, "another")
    path.write_bytes(b"torn")
    with pytest.raises(ResultsError, match="run the unquantized cell again"):
        Base.load(path, "key of the cell")


def test_requests_in_another_order_meet_their_own_distributions():
    model, requests = llama(), choices(9)
    recorder = Recorder()
    watch(model, recorder, requests)
    meter = Meter(recorder.base("k"))
    watch(model, meter, requests[::-1], "fast")
    assert np.abs(meter.measured["choices"].kl).max() < 1e-4


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (choices(5, task="other"), "kept no distributions"),
        (choices(6), "in the unquantized cell 0"),
        (choices(5, seed=1), "scored tokens, in the unquantized cell"),
    ],
)
def test_other_requests_than_the_bases_are_refused(requests, words):
    recorder = Recorder()
    watch(llama(), recorder, choices(5))
    with pytest.raises(EvaluationError, match=words):
        watch(llama(), Meter(recorder.base("k")), requests)


def outcomes(values, metric="acc", weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    return pd.DataFrame(
        {
            "task": "t",
            "document": range(len(values)),
            "metric": metric,
            "value": np.asarray(values, dtype=float),
            "weight": np.asarray(weights, dtype=float),
        }
    )


def test_flips_are_counted_in_both_directions():
    found = flips(outcomes([1, 1, 0, 0, 1]), outcomes([0, 0, 1, 0, 1]))
    assert found == {"acc": Flips(documents=5, right_to_wrong=2, wrong_to_right=1)}


def test_log_likelihoods_are_no_flips():
    assert flips(outcomes([-1.5, -2.0]), outcomes([-1.5, 0.0])) == {}


def test_the_perplexity_ratio_and_its_error_by_hand():
    base = outcomes([-10.0, -20.0, -33.0], "word_perplexity", [5, 8, 11])
    worse = outcomes([-11.0, -20.5, -36.0], "word_perplexity", [5, 8, 11])
    found = perplexity_ratio(base, worse)
    assert found.value == pytest.approx((1 + 0.5 + 3) / 24)
    ratio = 4.5 / 24
    residuals = np.array([1 - 5 * ratio, 0.5 - 8 * ratio, 3 - 11 * ratio])
    assert found.stderr == pytest.approx(math.sqrt((residuals**2).sum() * 3 / 2) / 24)
    assert found.documents == 3


def test_the_perplexity_ratios_error_is_that_of_repeated_draws():
    """Simulation: pages of uneven length; the stated error against the spread of the estimate."""
    draw = np.random.default_rng(0)
    values, errors = [], []
    for _ in range(400):
        words = draw.integers(20, 400, 60).astype(float)
        change = words * draw.normal(0.05, 0.02, 60)
        found = perplexity_ratio(outcomes(0 * words, "p", words), outcomes(-change, "p", words))
        values.append(found.value)
        errors.append(found.stderr)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.12)


def test_the_right_answers_change_is_that_of_its_own_request():
    def responses(values):
        return pd.DataFrame(
            [("t", d, r, v, False) for (d, r), v in values.items()],
            columns=["task", "document", "request", "log_likelihood", "greedy"],
        )

    base = responses({(0, 0): -1.0, (0, 1): -2.0, (1, 0): -3.0, (1, 1): -4.0})
    after = responses({(0, 0): -9.0, (0, 1): -2.5, (1, 0): -3.25, (1, 1): -9.0})
    found = answer_change(base, after, {0: 1, 1: 0})
    assert found.value == pytest.approx((-0.5 - 0.25) / 2)
    assert found.documents == 2


def test_damage_has_a_part_for_each_task():
    scores = (
        Score(task="t", label="t", metric="acc", value=0.5, stderr=0.1, higher_is_better=True,
              aggregation="mean", documents=2),
        Score(task="t", label="t", metric="ppl", value=9.0, stderr=None, higher_is_better=False,
              aggregation="perplexity", documents=2),
    )  # fmt: skip
    table = pd.concat([outcomes([1, 0]), outcomes([-1.0, -2.0], "ppl")])
    later = pd.concat([outcomes([0, 0]), outcomes([-1.5, -2.5], "ppl")])
    responses = pd.DataFrame(
        [("t", 0, 0, -1.0, False), ("t", 1, 0, -2.0, False)],
        columns=["task", "document", "request", "log_likelihood", "greedy"],
    )
    found = damage(
        Outcomes(outcomes=table, responses=responses, scores=scores),
        Outcomes(outcomes=later, responses=responses, scores=scores),
        measured={"t": measured(choices(5), noise=0.1)},
        correct={"t": {0: 0, 1: 0}},
    ).tasks["t"]
    assert found.flips["acc"].right_to_wrong == 1
    assert found.ln_perplexity_ratio["ppl"].value == pytest.approx(0.5)
    assert found.correct_answer.value == 0
    assert found.distributions.kl.mean > 0
