"""Scores of models with a KV cache of few bits: fast scoring's as exact scoring's."""

from __future__ import annotations

import pytest
import torch
from scoring_models import choices, llama, pages, scorer

from qbench.attention.kv_cache import KV_CACHE
from qbench.attention.transformers import attend
from qbench.evaluation.scoring.forward import unquantized_activations
from qbench.evaluation.scoring.generate import greedy
from qbench.evaluation.settings import Tolerance
from qbench.quantizers.names import config_of
from qbench.quantizers.quantize import apply

SCHEMES = {
    "token": "int4-token",
    "fp8": "fp8-token",
    "first tokens": {"name": "int4-token", "keep_first": 3},
    "recent tokens": {"name": "int3-token", "keep_recent": 6},
    "kivi": {"name": "int4-channel", "group_size": 8},
    "kivi, recent, before RoPE": {
        "name": "int3-channel", "group_size": 8, "keep_recent": 8, "before_rope": True,
    },
}  # fmt: skip
LOOSE = Tolerance(mean=10.0, largest=10.0, changed=1.0)


def model_with(scheme, normalizer="softpick"):
    model = llama()
    attend(model, normalizer=normalizer)
    if scheme is None:
        return model
    return apply(model, config_of({"kv": SCHEMES[scheme]}, compute_dtype="float32"), {})


def assert_close(found, expected):
    """A value may lie on the border between two codes, and rounding then decide: of a few."""
    off = sorted(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert off[len(off) * 3 // 4] < 1e-3
    assert off[-1] < 0.5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fast_scores_are_the_exact_ones(scheme):
    model, requests = model_with(scheme), choices(9)
    exact = scorer(model, "exact").loglikelihood(requests, disable_tqdm=True)
    fast = scorer(model, "fast", tolerance=LOOSE).loglikelihood(requests, disable_tqdm=True)
    assert_close([a for a, _ in fast], [a for a, _ in exact])
    plain = scorer(model_with(None), "exact").loglikelihood(requests, disable_tqdm=True)
    assert max(abs(a - b) for (a, _), (b, _) in zip(plain, exact, strict=True)) > 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fast_windows_are_the_exact_ones(scheme):
    model, requests = model_with(scheme, "softmax"), pages((3, 75, 40))
    exact = scorer(model, "exact").loglikelihood_rolling(requests, disable_tqdm=True)
    fast = scorer(model, "fast", tolerance=LOOSE)
    assert_close(fast.loglikelihood_rolling(requests, disable_tqdm=True), exact)


def test_the_cache_of_a_prefix_is_rounded_once(monkeypatch):
    """Before its keys are laid out for each of its suffixes."""
    from qbench.quantizers.kv_cache import rounding

    rounded = []
    right = rounding.by_token

    def noting(x, form, group):
        rounded.append(x.shape[2])
        return right(x, form, group)

    model = model_with("token")
    fast = scorer(model, "fast", sample=0, tolerance=LOOSE)
    monkeypatch.setattr(rounding, "by_token", noting)
    fast.loglikelihood(choices(9), disable_tqdm=True)
    assert sum(rounded) == fast.report().tokens * 3 * 2  # layers, keys and values


@pytest.mark.parametrize("scheme", ["first tokens", "kivi, recent, before RoPE"])
def test_prompts_decoded_side_by_side_read_the_same_cache(scheme):
    model = model_with(scheme)
    prompts = [[(7 * i + 3 * t) % 400 for t in range(21)] for i in range(3)]
    for prompt, answer in zip(prompts, greedy(model, prompts, 12), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        likeliest = logits[len(prompt) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == answer


def test_packs_are_tried_out_without_the_steps_of_few_bits(monkeypatch):
    """Which make rounding as large as the error of an attention that sees other tokens."""
    model = model_with("kivi, recent, before RoPE")
    cache = getattr(model.model.layers[0].self_attn, KV_CACHE)
    right = cache.rounded

    def unsteady(key, value, positions):
        coded = right(key, value, positions)
        return tuple(x + torch.randn(x.shape) * x.norm(dim=-1, keepdim=True) for x in coded)

    monkeypatch.setattr(cache, "rounded", unsteady)
    fast = scorer(model, "fast", sample=0, tolerance=LOOSE)
    before = fast.loglikelihood(choices(2), disable_tqdm=True)
    assert before != fast.loglikelihood(choices(2), disable_tqdm=True)  # it is rounded again
    ids = torch.arange(9)[None]
    with torch.no_grad(), unquantized_activations(model):
        paused = model(ids, use_cache=False).logits
    plain = model_with(None)(ids, use_cache=False).logits
    torch.testing.assert_close(paused, plain, rtol=0, atol=1e-4)
