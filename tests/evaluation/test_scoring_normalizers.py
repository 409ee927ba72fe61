"""Scores under every normalizer: exact ones as lm-eval's to the bit, fast ones as exact ones; with
windows, a soft cap and ALiBi's slopes, and with a KV cache of few bits."""

from __future__ import annotations

import pytest
import torch
from normalizer_parameters import attach
from scoring_models import choices, llama, pages, scorer
from transformers import Gemma2Config, Gemma2ForCausalLM

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.transformers import attend
from qbench.evaluation.settings import Tolerance
from qbench.quantizers.names import config_of
from qbench.quantizers.quantize import apply

LOOSE = Tolerance(mean=10.0, largest=10.0, changed=1.0)


def gemma2():
    """A window in every other layer, scores capped at 3."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=400, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=4,
        sliding_window=8, attn_logit_softcapping=3.0, final_logit_softcapping=None,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


def model_with(normalizer, make=llama, slopes=True):
    model = attach(make(), normalizer, slopes=slopes)
    assert attend(model, normalizer=normalizer) == f"{normalizer}/reference"
    return model


def answers(model, mode, requests=None, **changes):
    requests = choices(7) if requests is None else requests
    return scorer(model, mode, **changes).loglikelihood(requests, disable_tqdm=True)


@pytest.mark.parametrize("make", [llama, gemma2])
@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_exact_scores_equal_those_of_hflm_to_the_bit(normalizer, make):
    model = model_with(normalizer, make, slopes=make is gemma2)
    expected = answers(model, "lm-eval")
    assert answers(model, "exact") == expected
    requests = pages((3, 0, 75))
    theirs, ours = (scorer(model, mode) for mode in ("lm-eval", "exact"))
    assert ours.loglikelihood_rolling(requests, disable_tqdm=True) == (
        theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    )
    if normalizer != "softmax":
        attend(model, normalizer="softmax")
        softmax = answers(model, "exact")
        assert max(abs(a - b) for (a, _), (b, _) in zip(expected, softmax, strict=True)) > 0.1


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_fast_scores_are_the_exact_ones(normalizer):
    model = model_with(normalizer)
    found, expected = (answers(model, mode) for mode in ("fast", "exact"))
    assert [a for a, _ in found] == pytest.approx([a for a, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    requests = pages((3, 75, 40))
    fast, exact = (scorer(model, mode) for mode in ("fast", "exact"))
    assert fast.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(
        exact.loglikelihood_rolling(requests, disable_tqdm=True), abs=1e-3
    )


@pytest.mark.parametrize("cache", ["int4-token", {"name": "int4-channel", "group_size": 8}])
@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_fast_scores_of_a_quantized_cache_are_the_exact_ones(normalizer, cache):
    plain = answers(model_with(normalizer), "exact")
    quantizer = config_of({"kv": cache}, compute_dtype="float32")
    model = apply(model_with(normalizer), quantizer, {})
    exact, fast = answers(model, "exact"), answers(model, "fast", tolerance=LOOSE)
    off = sorted(abs(a - b) for (a, _), (b, _) in zip(fast, exact, strict=True))
    # A value may lie on the border between two codes, and rounding then decide: of a few.
    assert off[len(off) * 3 // 4] < 1e-3
    assert off[-1] < 0.5
    assert max(abs(a - b) for (a, _), (b, _) in zip(plain, exact, strict=True)) > 0.05
