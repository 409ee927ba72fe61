"""A record is held against a tolerance that may be tighter than when it was made."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.evaluation.scoring.scorer import Check
from qbench.evaluation.settings import Tolerance, beyond, exceeded
from qbench.records import DifferenceFromExact, SampleDifference, ScoringReport


def sample(task="a", **changes):
    values = {"documents": 20, "requests": 80, "mean_per_token": 0.01, "largest_per_token": 0.2,
              "changed_answers": 1}  # fmt: skip
    return SampleDifference(task=task, **(values | changes))


def report(*samples, mode="fast"):
    difference = DifferenceFromExact(
        documents=20, requests=80, largest=1.0, mean=0.1, largest_per_token=0.2,
        mean_per_token=0.01, changed_answers=1, samples=samples,
    )  # fmt: skip
    return ScoringReport(
        mode=mode,
        softmax_dtype="float32",
        batching="packed",
        peak_memory_gib=1.0,
        difference_from_exact=difference if mode == "fast" else None,
    )


def test_what_passed_passes_under_the_same_bounds():
    assert exceeded(Tolerance(), report(sample(), sample("b"))) is None


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"mean": 0.005}, "the mean of the sample is 0.01 nats a token off"),
        ({"largest": 0.1}, "one request of the sample is 0.2 nats a token off"),
        ({"changed": 0.05}, "3 of 20 answers changed"),
    ],
)
def test_a_tightened_bound_names_task_and_bound(bounds, words):
    near = sample("a", mean_per_token=0.001, largest_per_token=0.01)
    found = report(near, sample("b", changed_answers=3))
    assert exceeded(Tolerance(changed=0.5), found) is None
    ((name, most),) = bounds.items()
    assert exceeded(Tolerance(**({"changed": 0.5} | bounds)), found) == (
        f"b: fast scoring differs from exact: {words}, more than "
        f"evaluation.tolerance.{name} {most:g}"
    )


@pytest.mark.parametrize(
    ("bias", "stderr", "documents", "passes"),
    [
        (0.04, None, 1, True),
        (-0.06, None, 1, False),
        (0.2062, 0.073, 32, True),  # 1 of 120 samples has that by chance, and a grid has 150
        (0.18, 0.03, 32, True),  # within 4.46 standard errors of the bound
        (-0.19, 0.03, 32, False),
        (0.24, 0.03, 2, True),  # within 6.6
        (0.26, 0.03, 2, False),
    ],
)
def test_where_rounding_is_amplified_the_mean_with_its_sign_is_judged_alone(
    bias, stderr, documents, passes
):
    far = {"mean_per_token": 0.4, "largest_per_token": 3.0, "changed_answers": 15}
    far |= {"documents": documents}
    biased = sample(**far, bias_per_token=bias, bias_stderr=stderr, by_bias=True)
    refusal = exceeded(Tolerance(), report(biased))
    assert (refusal is None) == passes
    if not passes:
        assert f"its mean difference on the sample is {bias:+.4g} ± " in refusal
        assert "evaluation.tolerance.mean 0.05" in refusal
    assert exceeded(Tolerance(), report(sample(**far, bias_per_token=bias)))  # of other cells


NOISE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape) / 3**0.5,
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
}


@pytest.mark.parametrize("noise", NOISE)
def test_a_grid_seldom_fails_by_chance_and_a_wrong_score_seldom_passes(noise):
    """20 grids of 150 samples of 32 documents whose mean scatters by 0.073 nats a token, as that
    of 4-bit activations in blocks does. Two standard errors would fail 8 to 60 of the 3,000."""
    scatter = 0.073 * NOISE[noise](np.random.default_rng(0), (3000, 32)) * 32**0.5

    def fail(bias):
        means, errors = bias + scatter.mean(1), scatter.std(1, ddof=1) / 32**0.5
        found = [
            sample(documents=32, bias_per_token=mean, bias_stderr=error, by_bias=True)
            for mean, error in zip(means.tolist(), errors.tolist(), strict=True)
        ]
        return sum(beyond(Tolerance(), one) is not None for one in found) / 3000

    assert fail(0.0) <= 0.001
    assert fail(0.6) > 0.95


def test_bias_is_the_mean_over_documents_with_its_standard_error():
    check = Check(Tolerance(), by_bias=True)
    found = check.compare(
        task="a", documents=[0, 0, 1, 2], tokens=[1, 1, 2, 1],
        fast=[(-1.0, True), (-2.0, True), (-3.0, True), (-1.5, True)],
        exact=[(-1.2, True), (-1.8, True), (-2.4, True), (-1.2, False)],
    ).sample  # fmt: skip
    # documents: (0.2 − 0.2) / 2, −0.6 / 2, −0.3
    assert found.bias_per_token == pytest.approx(-0.2)
    assert found.bias_stderr == pytest.approx(0.1)
    assert found.mean_per_token == pytest.approx((0.2 + 0.2 + 0.3 + 0.3) / 4)
    assert found.by_bias


def test_a_single_changed_answer_never_fails():
    assert exceeded(Tolerance(changed=0.0), report(sample(changed_answers=1))) is None
    assert exceeded(Tolerance(changed=0.0), report(sample(changed_answers=2)))


@pytest.mark.parametrize("mode", ["exact", "lm-eval"])
def test_what_was_not_scored_fast_has_nothing_to_exceed(mode):
    assert exceeded(Tolerance(mean=1e-9), report(mode=mode)) is None
    assert exceeded(Tolerance(), None) is None


def test_a_record_that_does_not_say_its_differences_by_task_does_not_pass():
    assert "not known by task" in exceeded(Tolerance(), report())


def test_fast_scoring_records_each_tasks_sample():
    from scoring_models import choices, llama, scorer

    fast = scorer(llama(), "fast")
    for task in ("a", "b"):
        fast.loglikelihood(choices(9, task=task), disable_tqdm=True)
    found = fast.report()
    assert [s.task for s in found.difference_from_exact.samples] == ["a", "b"]
    assert all(s.documents == 8 for s in found.difference_from_exact.samples)
    assert exceeded(Tolerance(), found) is None
    assert exceeded(Tolerance(mean=1e-12), found) is not None
