"""What a recipe's evaluation means for one checkpoint: nothing is left open in a key. A record is
held against a tolerance that may be tighter than when it was made."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from qbench.errors import RecipeError
from qbench.evaluation.scoring.scorer import compare
from qbench.evaluation.settings import (
    ScoringSettings,
    Tolerance,
    sample_violation,
    tolerance_violation,
    undecided,
)
from qbench.plan import scoring_settings
from qbench.recipe import Evaluation
from qbench.records import DifferenceFromExact, SampleDifference, ScoringReport

SMALL = {"hidden_size": 1024}


def resolved(device="cuda", config=SMALL, own_length=4096, shares_scales=False, **asked):
    return scoring_settings(
        Evaluation(**asked),
        SimpleNamespace(config=config, max_length=own_length, source="mine"),
        SimpleNamespace(
            runtime="transformers", amplifies_rounding=False, batch_invariant=not shares_scales
        ),
        device=device,
    )


@pytest.mark.parametrize(
    ("device", "mode", "sizes"),
    [("cuda", "fast", (64, 8, 65_536, 32)), ("cpu", "exact", (8, 1, None, 0))],
)
@pytest.mark.parametrize("shares_scales", [False, True])
def test_auto_is_decided_by_the_device(device, mode, sizes, shares_scales):
    found = resolved(device, shares_scales=shares_scales)
    assert found.mode == mode
    if shares_scales and sizes[2]:  # a pack is a batch
        sizes = (*sizes[:2], sizes[2] // 2, sizes[3])
    assert sizes == (found.batch_size, found.window_batch_size, found.batch_tokens, found.sample)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scoring", ["auto", "exact", "fast", "lm-eval"])
def test_a_key_holds_every_setting_but_the_tolerance_and_no_auto(device, scoring):
    found = resolved(device, scoring=scoring)
    parts = found.key_parts()
    names = {field.name for field in dataclasses.fields(ScoringSettings)}
    assert set(parts) == names - {
        "tolerance", "amplifies_rounding", "fallback", "packed", "shares_scales", "chat"
    }  # fmt: skip
    assert "auto" not in json.dumps(parts)
    assert resolved(device, scoring=scoring, tolerance=Tolerance(mean=1.0)).key_parts() == parts


def test_the_checkpoints_own_context_is_a_bound():
    assert resolved(own_length=512).max_length == 512
    assert resolved(own_length=512, max_length=4096).max_length == 512
    assert resolved(own_length=4096, max_length=512).max_length == 512
    with pytest.raises(RecipeError, match=r"evaluation\.max_length: .* set max_length"):
        resolved(own_length=None)


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


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"mean": 0.005}, "the sample's mean difference is 0.01 nats per token"),
        ({"largest": 0.1}, "one request of the sample differs by 0.2 nats per token"),
        ({"changed": 0.05}, "3 of 20 answers changed"),
    ],
)
def test_a_tightened_bound_names_task_and_bound(bounds, words):
    near = sample("a", mean_per_token=0.001, largest_per_token=0.01)
    found = report(near, sample("b", changed_answers=3))
    assert tolerance_violation(Tolerance(changed=0.5), found) is None
    ((name, most),) = bounds.items()
    assert tolerance_violation(Tolerance(**({"changed": 0.5} | bounds)), found) == (
        f"b: fast scoring differs from exact: {words}, more than "
        f"evaluation.tolerance.{name} {most:g}"
    )


@pytest.mark.parametrize(
    ("by_bias", "bias", "stderr", "documents", "population", "passes"),
    [
        (False, 0.045, 0.001, 32, 500, False),  # more than the README's effect
        (False, -0.045, 0.001, 500, 500, False),
        (False, 0.010, 0.003, 32, 500, True),
        (False, 0.010, 0.010, 32, 500, False),  # may be as far off
        (False, 0.010, 0.010, 500, 500, True),  # of all documents
        (True, 0.8, 0.3, 2, 400, False),
        (True, 0.2062, 0.073, 32, 400, False),
        (True, 0.030, 0.006, 200, 400, True),
        (True, -0.060, 0.030, 40, 40, True),  # within the noise of batches
        (True, -0.060, 0.003, 40, 40, False),
        (True, -0.060, 0.030, 40, 4000, False),
        (True, 0.149, 0.500, 40, 40, True),
        (True, 0.151, 0.500, 40, 40, False),  # noise adds twice the bound at most
        (True, 0.049, None, 1, 1, True),
        (True, 0.001, None, 1, 2, False),
    ],
)
def test_a_bias_passes_if_it_lies_within_its_bound_with_certainty(
    by_bias, bias, stderr, documents, population, passes
):
    """Single requests of cells that amplify rounding differ as much as quantization costs."""
    far = {"mean_per_token": 0.4, "largest_per_token": 3.0, "changed_answers": 15}
    about = {"documents": documents, "population": population, "bias_stderr": stderr}
    one = sample(**(far if by_bias else {}), **about, bias_per_token=bias, by_bias=by_bias)
    refusal = tolerance_violation(Tolerance(), report(one))
    assert (refusal is None) == passes
    if not passes:
        assert f"its bias on the sample is {bias:+.4g} ± " in refusal
        assert f"evaluation.tolerance.{'mean 0.05' if by_bias else 'bias 0.02'}" in refusal


NOISE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape) / 3**0.5,
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
}


@pytest.mark.parametrize("first", [8, 32])
@pytest.mark.parametrize(
    "noise", [pytest.param(n, marks=[pytest.mark.slow] * (n == "normal")) for n in NOISE]
)
@pytest.mark.parametrize(
    ("by_bias", "scatter", "bias", "passing", "documents"),
    [
        (False, 0.03, 0.0, (1, 1), 100),
        (False, 0.03, 0.025, (0, 0.04), 1000),
        (False, 0.03, 0.045, (0, 0.001), 1000),
        (True, 0.4, 0.0, (1, 1), 450),  # as 4-bit activations in blocks scatter
        (True, 0.4, 0.12, (0, 0.03), 1000),
        (True, 0.4, 0.8, (0, 0), 50),
        (True, 1.25, 0.0, (1, 1), 750),  # as int8 with one scale for all tokens of SmolLM2 does
        (True, 1.25, 0.4, (0, 0.03), 1000),
    ],
)
def test_samples_grow_until_a_bias_is_found_and_no_task_fails_by_chance(
    noise, first, by_bias, scatter, bias, passing, documents
):
    """300 tasks of 1,000 documents, sampled from ``first`` on, ``documents`` of them at most on
    average. Fewer than 32 never say that a task is too far.
    Where rounding is amplified, ``bias`` is what another batching does not remove; the mean over
    all documents differs from it by chance."""
    rng, passed, scored = np.random.default_rng(0), 0, 0
    for _ in range(300):
        off = NOISE[noise](rng, 1000)
        off = bias + scatter * (off if by_bias else (off - off.mean()) / off.std())
        for count in (8, 16, 32, 64, 128, 256, 512, 1000)[0 if first == 8 else 2 :]:
            error = off[:count].std(ddof=1) / count**0.5
            one = sample(
                documents=count, population=1000, bias_per_token=float(off[:count].mean()),
                bias_stderr=float(error), by_bias=by_bias,
            )  # fmt: skip
            violation = sample_violation(Tolerance(), one)
            if not (undecided(Tolerance(), one) or (violation and count < 32)):
                break
        passed += violation is None
        scored += count
    least, most = passing
    assert least <= passed / 300 <= most
    assert scored / 300 <= documents


def test_a_sample_has_its_bias_over_documents_differences_per_token_and_changed_answers():
    (found,) = compare(
        "a", by_bias=True, documents=[0, 0, 1, 2], tokens=[1, 1, 2, 1],
        fast=[(-1.0, True), (-2.0, True), (-3.0, True), (-1.5, True)],
        exact=[(-1.9, True), (-1.1, True), (-2.4, True), (-1.2, False)],
    ).samples  # fmt: skip
    # documents: (0.9 − 0.9) / 2, −0.6 / 2, −0.3
    assert found.bias_per_token == pytest.approx(-0.2)
    assert found.bias_stderr == pytest.approx(0.1)
    assert found.mean_per_token == pytest.approx((0.9 + 0.9 + 0.3 + 0.3) / 4)
    assert found.largest_per_token == pytest.approx(0.9)
    # of the first the other request is likelier, of the last it is not the greedy answer any more
    assert found.changed_answers == 2
    assert found.by_bias


def test_a_single_changed_answer_never_fails_nor_what_was_not_scored_fast():
    assert tolerance_violation(Tolerance(changed=0.0), report(sample(changed_answers=1))) is None
    assert tolerance_violation(Tolerance(changed=0.0), report(sample(changed_answers=2)))
    for mode in ("exact", "lm-eval"):
        assert tolerance_violation(Tolerance(mean=1e-9), report(mode=mode)) is None
    assert tolerance_violation(Tolerance(), None) is None
