"""Scores of other models, under every normalizer, and of quantized ones: exact as lm-eval's, fast
as exact, or refused with the reason and what to say instead."""

import numpy as np
import pytest
import torch
from normalizer_parameters import attach
from quantizer_models import DIGEST
from scoring_models import (
    ask,
    choices,
    instance,
    llama,
    pages,
    recorded,
    scorer,
    settings,
    text,
    tokenizer,
    watch,
)
from tiny import tiny_model
from treated_models import decoder

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.transformers import set_attention
from qbench.evaluation.kl_observer import KLObserver
from qbench.evaluation.scoring.batching import Packing, Padding, to_requests
from qbench.evaluation.scoring.forward import PackedForward, fit_settings, packing_problem
from qbench.evaluation.settings import Tolerance
from qbench.quantizers import config_of
from qbench.quantizers.quantize import apply, quantize

# Softpick and one with parameters; softmax in test_scoring_exact, the others at night.
QUICK = ("softpick", "scalable-softpick-next")
EVERY = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
         for name in NORMALIZERS]  # fmt: skip
SCHEMES = {"token": "int4-token", "first tokens": {"name": "int3-token", "sink_tokens": 2}}
LOOSE = Tolerance(mean=10.0, largest=100.0, changed=1.0)


def answers(model, mode, requests=None, **changes):
    requests = choices(7) if requests is None else requests
    lm = scorer(model, mode, **changes)
    return [a if isinstance(a, tuple) else (a, None) for a in ask(lm, requests)]


def assert_close(found, expected):
    """A value may lie on the border between two codes, and rounding then decide: of a few."""
    off = sorted(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True))
    assert off[len(off) * 3 // 4] < 1e-3
    assert off[-1] < 0.5


def gemma2():
    """A window in every other layer, scores capped at 3."""
    return tiny_model("gemma2", attn_logit_softcapping=3.0, final_logit_softcapping=None)


def model_with(normalizer="softpick", scheme=None, make=llama, slopes=True):
    model = attach(make(), normalizer, slopes=slopes) if normalizer != "softpick" else make()
    assert set_attention(model, normalizer=normalizer) == f"{normalizer}/reference"
    if scheme is None:
        return model
    return apply(model, config_of({"kv": SCHEMES[scheme]}, compute_dtype="float32"), {})


@pytest.mark.parametrize("make", [llama, pytest.param(gemma2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalizer", EVERY)
def test_exact_scores_equal_those_of_hflm_to_the_bit(normalizer, make):
    model = model_with(normalizer, make=make, slopes=make is gemma2)
    expected = answers(model, "lm-eval")
    assert answers(model, "exact") == expected
    windows = pages((3, 0, 75))
    assert answers(model, "exact", windows) == answers(model, "lm-eval", windows)
    if normalizer != "softmax":
        set_attention(model, normalizer="softmax")
        softmax = answers(model, "exact")
        assert max(abs(a - b) for (a, _), (b, _) in zip(expected, softmax, strict=True)) > 0.1


@pytest.mark.parametrize("requests", [choices(7), pages((3, 75, 40))], ids=["choices", "windows"])
@pytest.mark.parametrize("normalizer", EVERY)
def test_fast_scores_are_the_exact_ones(normalizer, requests):
    model = model_with(normalizer)
    found, expected = (answers(model, mode, requests) for mode in ("fast", "exact"))
    assert [a for a, _ in found] == pytest.approx([a for a, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("requests", [choices(9), pages((3, 75, 40))], ids=["choices", "windows"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fast_scores_of_a_quantized_cache_are_the_exact_ones(scheme, requests):
    model = model_with(scheme=scheme)
    exact = answers(model, "exact", requests)
    assert_close(answers(model, "fast", requests, tolerance=LOOSE), exact)
    plain = answers(model_with(), "exact", requests)
    assert max(abs(a - b) for (a, _), (b, _) in zip(plain, exact, strict=True)) > 0.1


def other(kind, **changes):
    """A tiny model of another class, on our attention."""
    model = tiny_model(kind, **changes)
    set_attention(model, normalizer="softmax", implementation="reference")
    return model


@pytest.mark.parametrize("requests", [choices(7), pages((3, 75, 40))], ids=["choices", "windows"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}),  # a cap, and windows of 8 tokens
        ("bamba", {}),  # a state that runs on from token to token: texts in rows
        ("phi3", {"rope_parameters": {  # angles that depend on the longest text of a batch
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
            "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}),
    ],
)  # fmt: skip
def test_fast_scores_of_other_classes_are_the_exact_ones(kind, changes, requests):
    model = other(kind, **changes)
    fitted, _ = fit_settings(model, settings("fast"))
    assert fitted.packed == (kind == "gemma2")
    exact = answers(model, "exact", requests)
    assert exact == answers(model, "lm-eval", requests)
    fast = answers(model, "fast", requests, packed=fitted.packed)
    assert [a for a, _ in fast] == pytest.approx([a for a, _ in exact], abs=1e-3)


def test_rows_hold_as_many_tokens_as_a_pack():
    parts = [([1] * (n - 1), [1], i) for i, n in enumerate((3, 21, 9, 9, 9, 2, 50))]
    rows = Padding(max_length=40, batch_size=1, window_batch_size=1, batch_tokens=40)
    for windows in (True, False):
        planned = rows.plan(requests := to_requests(parts, windows=windows))
        shapes = [planned_batch.collate(requests).ids.shape for planned_batch in planned]
        assert shapes == [(1, 40), (2, 20), (2, 2)]  # equal inputs once


@pytest.mark.parametrize(("window", "of_mask"), [(None, 8), (4096, 8)])
def test_a_window_in_packs_that_is_not_the_masks_is_noticed(window, of_mask):
    """However short the texts of the probe are."""
    model = other("ministral")
    model.model.layers[0].self_attn.sliding_window = window
    problem = packing_problem(model, model.model)
    assert f"a layer's window is {window}, and its mask's is {of_mask}" in problem


@torch.no_grad()
def test_divergences_are_of_capped_logits():
    cap = {"final_logit_softcapping": 0.5}
    before, after = other("gemma2", **cap), other("gemma2", **cap)
    after.model.layers[0].mlp.down_proj.weight.mul_(-3)
    requests = [instance(text(1, 9), " the cat sat")]
    observer = KLObserver(recorded(before, requests))
    watch(after, observer, requests, "fast")
    ids = torch.tensor([tokenizer()(text(1, 9) + " the cat sat")["input_ids"]])
    p, q = (model(ids).logits[0, :-1].log_softmax(-1) for model in (before, after))
    expected = (p.exp() * (p - q)).sum(-1)
    kl = torch.tensor(observer.divergences["t"]["kl"])
    torch.testing.assert_close(kl, expected[-len(kl) :], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    "activations", ["int8-tensor", pytest.param("fp8-tensor", marks=pytest.mark.slow)]
)
def test_a_pack_is_a_batch_of_what_shares_a_scale(activations):
    """Its scores lie within the noise of batches of exact ones, and the record says how far."""
    entry = {"activations": activations}
    model = apply(model_with(), config_of(entry, compute_dtype="float32"), {})
    requests = choices(9)
    sizes = [answers(model, "exact", requests, batch_size=size) for size in (2, 16)]
    noise = np.abs(np.subtract(*([a for a, _ in scores] for scores in sizes)))
    shared = {"amplifies_rounding": True, "shares_scales": True}
    lm = scorer(model, "fast", tolerance=LOOSE, **shared)
    assert lm._reference.batching == lm.exact.batching
    fast = [a for a, _ in ask(lm, requests)]
    off = np.abs(np.subtract(fast, [a for a, _ in sizes[0]]))
    assert 0 < np.median(off) < 3 * np.median(noise)
    assert lm.report().difference_from_exact.samples[0].by_bias


TEXTS = ([5, 9, 11, 40, 2, 7, 31], [5, 9, 11, 40, 80, 3], [8, 6, 4, 90])  # two share a prefix


@torch.no_grad()
def test_packs_of_a_rotated_model_read_the_cache_that_sequences_read(tmp_path):
    entry = {"kv": "int4-token", "outliers": "rotation"}
    config = config_of(entry, compute_dtype="float32")
    model = quantize(
        decoder("llama-biases"), config, calibration=None, digest=DIGEST, artifacts=tmp_path
    )[0]
    alone = [model.model(torch.tensor([ids]), use_cache=False)[0][0, -1] for ids in TEXTS]
    requests = to_requests((ids, [0], i) for i, ids in enumerate(TEXTS))
    (pack,) = Packing(max_length=64, batch_tokens=64).plan(requests)
    batch = pack.collate(requests)
    rows = [batch.rows[batch.scored.row[list(batch.scored.index).index(i)]] for i in range(3)]
    packed = PackedForward(model, model.get_decoder())(batch)[rows]
    torch.testing.assert_close(packed, torch.stack(alone), rtol=1e-4, atol=1e-4)
