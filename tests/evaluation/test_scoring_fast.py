"""Fast scoring against exact: packing, order and batch size change nothing but rounding."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scoring_models import KINDS, ask, choices, llama, pages, scorer

from qbench.attention.transformers import set_attention
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.scoring import scorer as module
from qbench.evaluation.scoring.batching import Packing, to_requests
from qbench.evaluation.settings import Tolerance


def scorers(model, **changes):
    only_fast = ("batch_tokens", "sample")
    shared = {k: v for k, v in changes.items() if k not in only_fast}
    return [scorer(model, "exact", **shared), scorer(model, "fast", **changes)]


def softpick():
    model = llama()
    assert set_attention(model, normalizer="softpick") == "softpick/reference"
    return model


LOOSE = Tolerance(mean=10.0, largest=10.0, changed=1.0)
NOTHING = Tolerance(mean=1e-12, largest=1e-12, changed=0.0)


def assert_close(answers, expected, tolerance=1e-4):
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
    for (ours, _), (theirs, _) in zip(answers, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "split in two" not in kind])
def test_fast_equals_exact_in_float32(kind):
    exact, fast = scorers(softpick())
    expected = ask(exact, KINDS[kind])
    assert_close(ask(fast, KINDS[kind]), expected)


@pytest.mark.parametrize("batch_tokens", [70, 200])
def test_no_prefix_group_is_larger_than_a_pack_that_could_be_split(batch_tokens):
    """First rolling windows all have the prefix token for context; they share nothing else."""
    windows = to_requests(([0], range(5, 50 + i), i) for i in range(6))
    choices_ = to_requests((range(9), [20 + i, *range(30)], i) for i in range(12))

    def packs_of(requests, batch_tokens):
        packing = Packing(max_length=64, batch_tokens=batch_tokens)
        return packing.plan(requests)

    assert all(pack.requests == 1 for pack in packs_of(windows, 60))
    for requests in (windows, choices_):
        packs = packs_of(requests, batch_tokens)
        assert all(pack.tokens <= batch_tokens for pack in packs)
        members = [i for pack in packs for i in pack.collate(requests).request_indices]
        assert sorted(members) == list(range(len(requests)))
    (pack,) = packs_of(choices_, 500)
    assert np.diff(pack.collate(choices_).cu_seqlens_q).tolist() == [9] + [30] * 12


def test_packs_have_no_more_segments_than_a_kernels_grid_takes():
    model = llama(heads=4)
    many = to_requests((range(i, i + 5), [j, 1], i) for i in range(2000) for j in range(9))
    alike = to_requests((range(5), [i, j, 1], i) for i in range(150) for j in range(120))
    for requests in (many, alike):
        lm = scorer(model, "fast", batch_tokens=200_000)
        packs = lm.fast.batching.plan(requests)
        batches = [pack.collate(requests) for pack in packs]
        segments = [len(batch.cu_seqlens_q) - 1 for batch in batches]
        assert max(segments) * 4 <= 65_535 < sum(segments) * 4
        assert sum(len(batch.request_indices) for batch in batches) == len(requests)


def test_the_difference_from_exact_is_measured_and_reported():
    _, fast = scorers(llama(dtype=torch.bfloat16), sample=6, tolerance=LOOSE)
    requests = choices(17)
    ask(fast, requests)
    ask(fast, pages((30, 50, 20)))
    difference = fast.report().difference_from_exact
    assert difference.documents == 6 + 2
    assert 0 < difference.mean <= difference.largest < 10
    assert difference.largest_per_token <= difference.largest


@pytest.mark.parametrize(
    ("kind", "amplifies", "shift", "fails"),
    [("choices", False, 0.045, True), ("choices", True, 0.03, False),
     ("windows", False, 0.005, False), ("windows", True, 0.8, True)],
)  # fmt: skip
def test_a_bias_that_could_move_a_headline_fails(kind, amplifies, shift, fails):
    """Of whole texts too, of which two windows are looked at first."""
    requests = choices(40) if kind == "choices" else pages((60,) * 12)
    _, fast = scorers(llama(), sample=8, amplifies_rounding=amplifies, max_length=64)
    right = fast._score

    def biased(work):
        scores, off = right(work), shift if work.backend is fast.fast else 0
        return [
            (score + off * count, greedy)
            for (score, greedy), count in zip(scores, work.requests.scored.tolist(), strict=True)
        ]

    fast._score = biased
    said = pytest.raises(EvaluationError, match=r"its bias on the sample is \+0\.(8|045)")
    with said if fails else nullcontext():
        ask(fast, requests)


def test_scores_that_are_not_numbers_fail():
    model = llama()
    _, fast = scorers(model)
    model.model.layers[1].mlp.down_proj.weight.data[:] = float("nan")
    with pytest.raises(
        EvaluationError, match="choices: log-likelihoods of the sample are not numbers"
    ):
        ask(fast, choices(3))


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_batch_that_runs_out_of_memory_is_halved_and_nothing_is_lost(mode):
    model = softpick()
    expected = ask(scorer(model, "exact"), choices(17))
    lm = scorer(model, mode, batch_size=8, batch_tokens=1000)
    forward = getattr(lm, mode).forward
    decoder = forward.decoder

    def small(ids, **settings):
        if ids.numel() > 250:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decoder(ids, **settings)

    forward.decoder = small
    assert_close(ask(lm, choices(17)), expected)
    assert lm.report().halvings > 0


@pytest.mark.parametrize(
    "requests",
    [choices(6), pytest.param(pages((30, 50, 20)), marks=pytest.mark.slow)],
    ids=["choices", "pages"],
)
def test_scores_beyond_the_tolerance_are_exact_by_auto_which_is_said_and_refused_by_name(requests):
    exact, fast = scorers(llama(dtype=torch.bfloat16), batch_size=3)
    auto = scorer(
        llama(dtype=torch.bfloat16), "fast", batch_size=3, tolerance=NOTHING, fallback=True
    )
    expected = ask(exact, requests)
    assert ask(auto, requests) == expected
    assert ask(fast, requests) != expected
    (task,) = {one.task_name for one in requests}
    report = auto.report()
    assert "fast scoring differs from exact" in report.exact_tasks[task]
    assert report.difference_from_exact.samples == ()
    assert fast.report().exact_tasks == {}
    _, fast = scorers(llama(dtype=torch.bfloat16), sample=2, tolerance=NOTHING)
    with pytest.raises(EvaluationError, match="fast scoring differs from exact"):
        ask(fast, requests)


def test_by_auto_only_the_task_that_is_beyond_is_exact(monkeypatch):
    def sample_violation(tolerance, sample):
        return "a: off" if sample.task == "a" else None

    monkeypatch.setattr(module, "sample_violation", sample_violation)
    exact, _ = scorers(llama())
    auto = scorer(llama(), "fast", fallback=True)
    kept = Kept()
    auto._observer = kept
    for seed, task in ((0, "a"), (5, "b")):
        requests = choices(9, seed=seed, task=task)
        answers = ask(auto, requests)
        if task == "a":
            assert answers == ask(exact, requests)
        assert kept.begun == (2 if task == "a" else 3)
    report = auto.report()
    assert list(report.exact_tasks) == ["a"]
    assert [one.task for one in report.difference_from_exact.samples] == ["b"]


class Kept:
    """An observer that counts how often a call began."""

    begun = 0

    def begin(self, instances, lengths, head):
        self.begun += 1

    def prepare(self, scored):
        return scored

    def batch(self, scored, hidden, projection):
        return None

    def end(self):
        pass


def test_an_attention_that_cannot_be_packed_is_refused():
    with pytest.raises(UnavailableError, match="'eager'"):
        scorer(llama(attention="eager"), "fast")
