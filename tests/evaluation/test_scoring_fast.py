"""Fast scoring against exact: packing, order and batch size change nothing but rounding."""

import re
from contextlib import nullcontext

import pytest
import torch
from scoring_models import KINDS, ask, choices, llama, pages, scorer

from qbench.attention.transformers import set_attention
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.scoring import scorer as module
from qbench.evaluation.scoring.batching import Packing, Request
from qbench.evaluation.scoring.scorer import compare
from qbench.evaluation.settings import Tolerance, sample_violation


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
    expected = exact.loglikelihood(KINDS[kind], disable_tqdm=True)
    assert_close(fast.loglikelihood(KINDS[kind], disable_tqdm=True), expected)


def test_the_sample_is_queued_before_the_device_is_waited_for(monkeypatch):
    _, fast = scorers(llama(), sample=4, tolerance=LOOSE)
    order, queue, wait = [], fast._queue, module.in_order

    def queued(backend, *rest):
        order.append("exact" if backend.exact else "fast")
        return queue(backend, *rest)

    monkeypatch.setattr(fast, "_queue", queued)
    monkeypatch.setattr(module, "in_order", lambda *a, **k: order.append("wait") or wait(*a, **k))
    fast.loglikelihood(choices(17), disable_tqdm=True)
    assert order == ["fast", "exact", "wait", "wait"]


@pytest.mark.parametrize(("batch_tokens", "bos"), [(1, False), (100_000, True)])
def test_the_size_of_a_pack_does_not_matter(batch_tokens, bos):
    exact, fast = scorers(softpick(), batch_tokens=batch_tokens, bos=bos)
    expected = exact.loglikelihood(choices(11, seed=3), disable_tqdm=True)
    assert_close(fast.loglikelihood(choices(11, seed=3), disable_tqdm=True), expected)


@pytest.mark.parametrize("batch_tokens", [70, 200])
def test_no_prefix_group_is_larger_than_a_pack_that_could_be_split(batch_tokens):
    """First rolling windows all have the prefix token for context; they share nothing else."""
    windows = [Request([0, *range(5, 50 + i)], 1, i) for i in range(6)]
    choices_ = [Request([*range(9), 20 + i, *range(30)], 9, i) for i in range(12)]

    def packs_of(requests, batch_tokens):
        packing = Packing(max_length=64, batch_tokens=batch_tokens)
        return packing.plan(requests, windows=False)

    assert all(len(pack.groups[0].request_indices) == 1 for pack in packs_of(windows, 60))
    for requests in (windows, choices_):
        packs = packs_of(requests, batch_tokens)
        assert all(sum(group.tokens for group in pack.groups) <= batch_tokens for pack in packs)
        members = [i for pack in packs for group in pack.groups for i, _ in group.request_indices]
        assert sorted(members) == list(range(len(requests)))
    group = packs_of(choices_, 500)[0].groups[0]
    assert len(group.prefix) == 9
    assert len(group.suffixes) == 12


def test_the_difference_from_exact_is_measured_and_reported():
    _, fast = scorers(llama(dtype=torch.bfloat16), sample=6, tolerance=LOOSE)
    requests = choices(17)
    fast.loglikelihood(requests, disable_tqdm=True)
    fast.loglikelihood_rolling(pages((30, 50, 20)), disable_tqdm=True)
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
    right = fast._queue

    def biased(backend, requests, *rest):
        scores, off = right(backend, requests, *rest), shift if backend is fast.fast else 0
        return lambda: [
            (score + off * request.scored, greedy)
            for (score, greedy), request in zip(scores(), requests, strict=True)
        ]

    fast._queue = biased
    said = pytest.raises(EvaluationError, match=r"its bias on the sample is \+0\.(8|045)")
    with said if fails else nullcontext():
        ask(fast, requests)


def test_one_request_far_off_fails_whatever_the_mean_is():
    bounds = Tolerance(mean=0.1, largest=1.0)
    near = {"documents": range(50), "tokens": [2] * 50, "exact": [(-3.0, False)] * 50}
    report = compare("t", fast=[(-3.1, False)] * 50, **near)
    assert report.mean == pytest.approx(0.1)
    assert report.largest_per_token == pytest.approx(0.05)
    (found,) = compare("t", fast=[(-3.0, False)] * 49 + [(-5.1, False)], **near).samples
    assert re.search(r"one request .*tolerance\.largest 1$", sample_violation(bounds, found))


def test_answers_that_change_fail_however_little_the_scores_differ():
    bounds = Tolerance(changed=0.1)
    documents = [i // 2 for i in range(40)]
    exact = [(-3.0, False), (-3.001, False)] * 20
    other = [(-3.0, False), (-2.999, False)]
    near = {"documents": documents, "tokens": [1] * 40, "exact": exact}
    (found,) = compare("t", fast=other * 2 + exact[4:], **near).samples
    assert found.changed_answers == 2
    assert sample_violation(bounds, found) is None
    (found,) = compare("t", fast=other * 3 + exact[6:], **near).samples
    assert re.search(
        r"3 of 20 answers changed.*tolerance\.changed 0\.1", sample_violation(bounds, found)
    )


def test_scores_that_are_not_numbers_fail():
    model = llama()
    _, fast = scorers(model)
    model.model.layers[1].mlp.down_proj.weight.data[:] = float("nan")
    with pytest.raises(
        EvaluationError, match="choices: log-likelihoods of the sample are not numbers"
    ):
        fast.loglikelihood(choices(3), disable_tqdm=True)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_batch_that_runs_out_of_memory_is_halved_and_nothing_is_lost(mode):
    model = softpick()
    expected = scorer(model, "exact").loglikelihood(choices(17), disable_tqdm=True)
    lm = scorer(model, mode, batch_size=8, batch_tokens=1000)
    forward = getattr(lm, mode).forward
    decoder = forward.decoder

    def small(ids, **settings):
        if ids.numel() > 250:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decoder(ids, **settings)

    forward.decoder = small
    assert_close(lm.loglikelihood(choices(17), disable_tqdm=True), expected)
    assert lm.report().halvings > 0


@pytest.mark.parametrize("requests", [choices(6), pages((30, 50, 20))], ids=["choices", "pages"])
def test_by_name_scores_beyond_the_tolerance_are_refused(requests):
    _, fast = scorers(llama(dtype=torch.bfloat16), sample=2, tolerance=NOTHING)
    with pytest.raises(EvaluationError, match="fast scoring differs from exact"):
        ask(fast, requests)


@pytest.mark.parametrize("requests", [choices(6), pages((30, 50, 20))], ids=["choices", "pages"])
def test_by_auto_they_are_exact_and_the_report_says_so(requests):
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


def test_by_auto_only_the_task_that_is_beyond_is_exact(monkeypatch):
    from qbench.evaluation.scoring import scorer as module

    def sample_violation(tolerance, sample):
        return "a: off" if sample.task == "a" else None

    monkeypatch.setattr(module, "sample_violation", sample_violation)
    exact, _ = scorers(llama())
    auto = scorer(llama(), "fast", fallback=True)
    kept = Kept()
    auto._observer = kept
    for seed, task in ((0, "a"), (5, "b")):
        requests = choices(9, seed=seed, task=task)
        answers = auto.loglikelihood(requests, disable_tqdm=True)
        if task == "a":
            assert answers == exact.loglikelihood(requests, disable_tqdm=True)
        assert kept.begun == (2 if task == "a" else 3)
    report = auto.report()
    assert list(report.exact_tasks) == ["a"]
    assert [one.task for one in report.difference_from_exact.samples] == ["b"]


class Kept:
    """An observer that counts how often a call began."""

    begun = 0

    def begin(self, instances, lengths, head):
        self.begun += 1

    def batch(self, scored, hidden, projection):
        return None

    def end(self):
        pass


def test_an_attention_that_cannot_be_packed_is_refused():
    with pytest.raises(UnavailableError, match="'eager'"):
        scorer(llama(attention="eager"), "fast")
