"""Exact and fast scoring on CUDA, on the kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

from scoring_models import choices, instance, llama, pages, text, tokenizer

from qbench.attention.interface import attend
from qbench.evaluation.scoring import language_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_with(normalizer: str, dtype: torch.dtype):
    model = llama(dtype=dtype, heads=4).cuda()
    assert attend(model, normalizer=normalizer) == f"{normalizer}/triton"
    return model


def scorer(model, mode, **settings):
    return language_model(model, tokenizer(), mode=mode, max_length=128, **settings)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_exact_is_within_1e_5_of_hflm_in_float32(normalizer):
    model = model_with(normalizer, torch.float32)
    requests = choices(60)
    expected = scorer(model, "lm-eval").loglikelihood(requests, disable_tqdm=True)
    ours = scorer(model, "exact").loglikelihood(requests, disable_tqdm=True)
    assert [a for a, _ in ours] == pytest.approx([a for a, _ in expected], rel=1e-5)
    windows = pages((3, 0, 75, 40, 1, 300))
    expected = scorer(model, "lm-eval").loglikelihood_rolling(windows, disable_tqdm=True)
    ours = scorer(model, "exact").loglikelihood_rolling(windows, disable_tqdm=True)
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.3)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("normalizer", ["softmax", "softpick", "rectified"])
def test_packs_on_the_kernels_stay_near_exact(normalizer, dtype, tolerance):
    """0.3 nats a token: these random logits reach ±30, where bfloat16 steps by 0.125."""
    model = model_with(normalizer, dtype)
    requests = [*choices(60), instance(text(1, 200), " the cat sat", 99)]
    fast = scorer(model, "fast", sample=61, tolerance=tolerance)
    fast.loglikelihood(requests, disable_tqdm=True)
    fast.loglikelihood_rolling(pages((3, 0, 75, 40, 1, 300)), disable_tqdm=True)
    difference = fast.report()["difference_from_exact"]
    assert difference["documents"] >= 61 + 1  # two windows may be of one page
    assert difference["largest_per_token"] <= tolerance


def test_a_real_out_of_memory_halves_the_batch_and_loses_nothing():
    model = model_with("softpick", torch.bfloat16)
    requests = [instance(text(i, 20), " " + text(i + 1, 30), i) for i in range(600)]
    expected = scorer(model, "fast").loglikelihood(requests, disable_tqdm=True)
    fast = scorer(model, "fast", batch_tokens=40_000, sample=0)
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((held + 64 * 2**20) / total)
        answers = fast.loglikelihood(requests, disable_tqdm=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert fast.report()["halvings"] > 0
    assert [a for a, _ in answers] == pytest.approx([a for a, _ in expected], abs=15)
    assert len(answers) == len(requests)


def test_the_batch_is_sized_from_the_measured_need():
    model = model_with("softpick", torch.bfloat16)
    fast = scorer(model, "fast")
    fast.loglikelihood(choices(60), disable_tqdm=True)
    report = fast.report()
    assert report["batch_tokens"] % 64 == 0
    assert 1024 <= report["batch_tokens"] <= 32_768
