"""Divergence from the unquantized model against full logits."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from scoring_models import ask, choices, instance, llama, pages, recorded, scorer, text, watch

from qbench.errors import EvaluationError
from qbench.evaluation.kl_observer import (
    BaselineWriter,
    KLObserver,
    distributions,
    divergence_table,
)
from qbench.evaluation.settings import Tolerance
from qbench.records import DIVERGENCE_COLUMNS


def quantized_like(model: torch.nn.Module, noise: float) -> torch.nn.Module:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.model.layers.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data += noise * parameter.data.float().std() * drawn
    return other


class Logits:
    """An observer that keeps whole rows of logits by index, in float64."""

    def begin(self, instances, lengths, head):
        self.rows: dict[int, torch.Tensor] = {}
        self.tokens = sum(lengths)
        return self

    def prepare(self, scored):
        return scored

    def batch(self, scored, hidden, projection):
        def keep(part) -> None:
            for row, index in zip(scored.row.tolist(), scored.index.tolist(), strict=True):
                if part.first <= row < part.last:
                    self.rows[index] = part.logits[row - part.first].double()

        return keep

    def end(self):
        self.table = torch.stack([self.rows[index] for index in range(self.tokens)])
        return lambda: None


def measured(model, other, requests, modes=("exact", "exact"), **changes):
    meter = KLObserver(recorded(model, requests, modes[0]))
    watch(other, meter, requests, modes[1], **changes)
    (result,) = meter.divergences.values()
    return result


REQUESTS = {
    "choices": choices(5),
    "windows": pages((30, 0, 120, 1)),
    "one token": [instance(text(i, 5), " the", i) for i in range(9)],
}
LOOSE_BOUNDS = Tolerance(mean=10.0, largest=100.0, changed=1.0)


@pytest.mark.parametrize(
    ("kind", "modes", "dtype"),
    [("choices", ("exact", "exact"), torch.bfloat16), ("windows", ("fast", "fast"), torch.bfloat16),
     ("one token", ("fast", "exact"), torch.float32)],
)  # fmt: skip
def test_a_model_against_itself_differs_by_nothing(kind, modes, dtype):
    """Argmax by one rule on both sides: in bfloat16 the likeliest tokens are often tied."""
    model = llama(dtype=dtype)
    result = measured(model, model, REQUESTS[kind], modes, tolerance=LOOSE_BOUNDS)
    assert np.abs(result.kl).max() < 1e-6
    assert result.agrees.all()
    assert np.abs(result.change).max() < 1e-5


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_call_may_begin_before_the_answers_of_the_last_are_waited_for(mode):
    model, other = llama(), quantized_like(llama(), 0.3)
    calls = [choices(5), choices(4, seed=9, task="more"), pages((30, 90))]
    writers = BaselineWriter(), BaselineWriter()
    watched = KLObserver(writers[0].hidden_states()), KLObserver(writers[0].hidden_states())
    for one, observers in ((model, writers), (other, watched)):
        for each in watched:
            each.base = writers[0].hidden_states()
        settings = {"max_length": 96, "sample": 2, "tolerance": LOOSE_BOUNDS}
        lms = [scorer(one, mode, observer=observer, **settings) for observer in observers]
        one_by_one = [(ask(lms[0], requests), lms[0].report()) for requests in calls]
        begun = [lms[1].start(requests[0].request_type, requests) for requests in calls]
        for (answers, report), wait in zip(one_by_one, begun, strict=True):
            assert answers == wait()
            counted = {"peak_memory_gib"}
            assert report.model_dump(exclude=counted) == lms[1].report().model_dump(exclude=counted)
    for name, states in writers[0].tasks.items():
        assert all(map(torch.equal, states[:2], writers[1].tasks[name][:2]))
    for name, table in watched[0].divergences.items():
        pd.testing.assert_frame_equal(table, watched[1].divergences[name])
    assert len(watched[0].divergences) == len(calls)


@pytest.mark.parametrize(
    ("kind", "mode", "dtype", "softmax_dtype"),
    [
        ("choices", "fast", torch.bfloat16, "float32"),
        ("choices", "exact", torch.bfloat16, "model"),
        ("windows", "fast", torch.bfloat16, "float32"),
        ("one token", "fast", torch.float32, "float32"),
    ],
)
def test_it_is_the_divergence_of_full_logits(kind, mode, dtype, softmax_dtype):
    """The head is changed too, as by a rotation: it must not stand for the unquantized one."""
    requests, model = REQUESTS[kind], llama(dtype=dtype)
    other = quantized_like(model, 0.3)
    other.lm_head.weight.data *= 1.5
    settings = {"tolerance": LOOSE_BOUNDS, "softmax_dtype": softmax_dtype}
    ours = measured(model, other, requests, (mode, mode), **settings)
    before, after = Logits(), Logits()
    watch(model, before, requests, mode, **settings)
    watch(other, after, requests, mode, **settings)
    p, q = before.table.log_softmax(-1), after.table.log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1).numpy()
    assert expected.mean() > 0.01
    np.testing.assert_allclose(ours.kl, expected, rtol=1e-4, atol=1e-6)
    kl = distributions(ours).kl
    assert kl.mean == pytest.approx(expected.mean(), rel=1e-4)
    for ours_, percent in ((kl.median, 50), (kl.p90, 90), (kl.p99, 99), (kl.p99_9, 99.9)):
        assert ours_ == pytest.approx(np.percentile(expected, percent), rel=1e-4)
    agrees = (before.table.argmax(-1) == after.table.argmax(-1)).numpy()
    assert (ours.agrees == agrees).all()
    assert not agrees.all()


def test_a_batch_that_is_repeated_for_want_of_memory_is_kept_once():
    model, requests = llama(), REQUESTS["choices"]
    expected = recorded(model, requests)
    recorder = BaselineWriter()
    lm = scorer(model, "exact", max_length=96, observer=recorder)
    decoder, seen = lm.exact.forward.decoder, []

    def after_some(ids, **settings):
        seen.append(ids.shape[0])
        if ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decoder(ids, **settings)

    lm.exact.forward.decoder = after_some
    ask(lm, requests)
    assert lm.report().halvings > 0
    found, there = recorder.hidden_states().tasks["choices"], expected.tasks["choices"]
    assert torch.equal(found.token, there.token)
    torch.testing.assert_close(found.states, there.states)


@pytest.mark.parametrize(
    ("kept", "asked"),
    [
        (choices(5), choices(6)),
        (choices(5), choices(5)[::-1]),
        (choices(5), choices(5, seed=1)),
        ([instance("the cat sat on", " the", 0)], [instance("the cat sat on", " a", 0)]),
    ],
)
def test_other_requests_and_tokens_than_the_bases_are_never_measured(kept, asked):
    base = recorded(llama(), kept)
    with pytest.raises(AssertionError, match="both cells' keys say what is asked"):
        watch(llama(), KLObserver(base), asked)


def test_an_lm_head_that_is_no_linear_layer_is_refused():
    class Scaled(torch.nn.Linear):
        pass

    model = llama()
    model.lm_head.__class__ = Scaled
    with pytest.raises(EvaluationError, match=r"not Scaled; set evaluation\.damage: false"):
        watch(model, BaselineWriter(), choices(2))


# Summaries of KL divergences against what hand-made tables say.


def test_divergences_are_summarized_over_tokens_and_documents():
    table = {"kl": [1.0, 2, 0], "agrees": [True, False, True], "document": range(3)}
    result = distributions(pd.DataFrame(table))
    assert result.kl.mean == 1
    assert result.kl.mean_stderr == pytest.approx(1 / 3**0.5)


def test_divergences_are_means_by_request_and_single_tokens_of_whole_texts(monkeypatch):
    monkeypatch.setattr("qbench.evaluation.kl_observer.TOKENS_KEPT", 4)
    documents = {"document": [0, 0, 1, 1, 2], "request": 0, "token": [7, 8, 9, 7, 8]}
    values = {"kl": [1.0, 3.0, 0.5, 0.5, 2.0], "change": [-1.0, 0, 1, 1, -2], "agrees": True}
    measured, names = pd.DataFrame(documents | values), {7: " a", 8: "b", 9: "<"}
    asked = divergence_table("asked", measured)
    whole = divergence_table("whole", measured, lambda ids: [names[i] for i in ids.tolist()])
    assert tuple(asked.columns) == tuple(whole.columns) == DIVERGENCE_COLUMNS
    assert asked["tokens"].tolist() == [2, 2, 1]
    assert asked["kl"].tolist() == [2.0, 0.5, 2.0]
    assert asked["change"].tolist() == [-0.5, 1.0, -2.0]
    assert asked["text"].isna().all()
    # two documents fit into four tokens, the third stays together
    assert whole["tokens"].tolist() == [1, 1, 1, 1, 1]
    assert whole["text"].tolist()[:4] == [" a", "b", "<", " a"]
    assert whole["text"].isna().tolist() == [False] * 4 + [True]
    assert whole["document"].tolist() == [0, 0, 1, 1, 2]
