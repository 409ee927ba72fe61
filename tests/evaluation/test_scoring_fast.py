"""Fast scoring against exact: packing, order and batch size change nothing but rounding."""

import random
import tracemalloc
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


def test_packs_hold_every_beginning_once_and_give_back_every_input():
    """Few-shot examples before questions before choices, a window that is a beginning of another,
    one text twice, and texts that share too little."""
    draw = random.Random(0)
    words = [[draw.randrange(9) for _ in range(draw.randint(1, 6))] for _ in range(60)]
    shots = [[50 + i for i in range(20)], [80 + i for i in range(15)]]
    asked = [(draw.choice(shots) + draw.choice(words), draw.choice(words)) for _ in range(90)]
    asked += [(shots[0], [shots[0][0]]), (shots[0][:7], shots[0][7:])]
    windows = [([0], range(5 + 50 * i, 50 + 51 * i)) for i in range(6)]
    for parts in (asked, windows):
        requests = to_requests((*map(list, pair), i) for i, pair in enumerate(parts))
        inputs = [tuple([*context, *rest][:-1][-64:]) for context, rest in parts]
        for batch_tokens in (75, 200, 5000):
            packing = Packing(max_length=64, batch_tokens=batch_tokens)
            packs = packing.plan(requests)
            members = []
            for pack in packs:
                batch = pack.collate(requests)
                cut = np.cumsum(batch.counts)[:-1]
                ends = batch.cu_seqlens_k[1:]
                keys = np.arange(batch.ids.size) if batch.keys is None else batch.keys
                assert batch.ids.size == pack.tokens <= batch_tokens
                assert np.diff(batch.cu_seqlens_q).min() > 0
                seen = {  # by its last token
                    keys[end - 1]: keys[end - count : end]
                    for end, count in zip(ends, np.diff(batch.cu_seqlens_k), strict=True)
                }
                scored = np.split(batch.scored.row, cut)
                for i, rows in zip(batch.request_indices, scored, strict=True):
                    path = seen[batch.rows[rows[-1]]]
                    assert tuple(batch.ids[0, path]) == inputs[i]
                    assert batch.positions[0, path].tolist() == list(range(len(path)))
                    assert batch.rows[rows].tolist() == path[-len(rows) :].tolist()
                members += batch.request_indices.tolist()
            assert sorted(members) == list(range(len(requests)))
        longest = {tuple(context): 0 for context, _ in parts}
        for (context, _), text in zip(parts, inputs, strict=True):
            longest[tuple(context)] = max(longest[tuple(context)], len(text))
        beginnings = {
            (longest[tuple(context)].bit_length(), *text[: i + 1])
            for (context, _), text in zip(parts, inputs, strict=True)
            for i in range(len(text))
        }
        once = len(beginnings) if parts is asked else sum(map(len, inputs))
        assert sum(pack.tokens for pack in packs) == once


def test_planning_packs_of_long_prompts_takes_little_memory():
    """Ten examples before each of 40,000 choices took seconds and GiB more than the tokens."""
    shots = list(range(1000))
    requests = to_requests(([*shots, i], [0], i) for i in range(300))
    tracemalloc.start()
    (pack,) = Packing(max_length=2048, batch_tokens=100_000).plan(requests)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pack.tokens == 1000 + 300
    assert most < 5 * requests.tokens.nbytes


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
    right = fast._queue

    def biased(work):
        scores, off = right(work), shift if work.backend is fast.fast else 0
        return lambda: [
            (score + off * count, greedy)
            for (score, greedy), count in zip(scores(), work.requests.scored.tolist(), strict=True)
        ]

    fast._queue = biased
    said = pytest.raises(EvaluationError, match=r"its bias on the sample is \+0\.(8|045)")
    with said if fails else nullcontext():
        ask(fast, requests)


@pytest.mark.parametrize(("off", "documents"), [(0.0, 2), (0.4, 8)], ids=["alike", "too far"])
def test_a_task_that_shares_its_sample_fails_by_the_whole_one_only(off, documents):
    requests, sampled = choices(40), set()
    lm = scorer(llama(), "fast", sample=8, samples={"choices": 2})
    right = lm._queue

    def shifted(work):
        """Scores of packs are off by as much per token, so that their bias is certain."""
        scores, packed = right(work), work.backend is lm.fast
        if not packed:
            sampled.update(requests[owner].doc_id for owner in work.requests.owners)
        by = off * packed * work.requests.scored
        return lambda: [(s + d, greedy) for (s, greedy), d in zip(scores(), by, strict=True)]

    lm._queue = shifted
    with pytest.raises(EvaluationError, match="nats per token") if off else nullcontext():
        ask(lm, requests)
    assert len(sampled) == documents


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
        return self

    def prepare(self, scored):
        return scored

    def batch(self, scored, hidden, projection):
        return None

    def end(self):
        return lambda: None


def test_an_attention_that_cannot_be_packed_is_refused():
    with pytest.raises(UnavailableError, match="'eager'"):
        scorer(llama(attention="eager"), "fast")
