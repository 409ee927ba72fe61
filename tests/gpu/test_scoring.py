"""Exact and fast scoring on CUDA, on the kernels."""

import pytest
import scoring_models
import torch
from scoring_models import ask, choices, instance, llama, pages, text
from test_kl import Logits, quantized_like
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from qbench.attention.transformers import set_attention
from qbench.evaluation import settings
from qbench.evaluation.kl_observer import BaselineWriter, KLObserver
from qbench.evaluation.settings import Tolerance


def model_with(normalizer: str, dtype: torch.dtype):
    model = llama(dtype=dtype, heads=4).cuda()
    assert set_attention(model, normalizer=normalizer) == f"{normalizer}/triton"
    return model


def scorer(model, mode, **changes):
    sizes = {"max_length": 128, "batch_size": 64, "window_batch_size": 8, "sample": 32}
    sizes["batch_tokens"] = settings.batch_tokens("cuda", model.config.to_dict())
    return scoring_models.scorer(model, mode, **(sizes | changes))


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_exact_is_within_1e_5_of_hflm_in_float32(normalizer):
    model = model_with(normalizer, torch.float32)
    requests = choices(60)
    expected = ask(scorer(model, "lm-eval"), requests)
    ours = ask(scorer(model, "exact"), requests)
    assert [a for a, _ in ours] == pytest.approx([a for a, _ in expected], rel=1e-5)
    windows = pages((3, 0, 75, 40, 1, 300))
    expected = ask(scorer(model, "lm-eval"), windows)
    ours = ask(scorer(model, "exact"), windows)
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 0.1)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("normalizer", ["softmax", "softpick", "rectified"])
def test_packs_on_the_kernels_stay_near_exact(normalizer, dtype, tolerance):
    """0.1 nats a token: these random logits reach ±30, where bfloat16 steps by 0.125."""
    model = model_with(normalizer, dtype)
    requests = [*choices(60), instance(text(1, 200), " the cat sat", 99)]
    bounds = Tolerance(mean=tolerance, largest=10 * tolerance, changed=0.2)
    fast = scorer(model, "fast", sample=61, tolerance=bounds)
    ask(fast, requests)
    ask(fast, pages((3, 0, 75, 40, 1, 300)))
    difference = fast.report().difference_from_exact
    assert difference.documents >= 61 + 1  # two windows may be of one page
    assert difference.largest_per_token <= 10 * tolerance


def test_a_real_out_of_memory_halves_the_batch_and_loses_nothing():
    model = model_with("softpick", torch.bfloat16)
    requests = [instance(text(i, 20), " " + text(i + 1, 30), i) for i in range(600)]
    expected = ask(scorer(model, "fast"), requests)
    fast = scorer(model, "fast", batch_tokens=40_000, sample=0)
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction((held + 64 * 2**20) / total)
        answers = ask(fast, requests)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert fast.report().halvings > 0
    assert [a for a, _ in answers] == pytest.approx([a for a, _ in expected], abs=15)
    assert len(answers) == len(requests)


ANY = Tolerance(mean=10.0, largest=100.0, changed=1.0)


def watch(model, mode, observer, requests):
    lm = scorer(model, mode, observer=observer, tolerance=ANY)
    return ask(lm, requests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_damage_is_the_divergence_of_full_logits(mode, dtype):
    model = model_with("softpick", dtype)
    other = quantized_like(model.cpu(), 0.3).cuda()
    model.cuda()
    writer, before, after, requests = BaselineWriter(), Logits(), Logits(), choices(60)
    for one, observer in ((model, writer), (model, before), (other, after)):
        watch(one, mode, observer, requests)
    meter = KLObserver(writer.hidden_states())
    watch(other, mode, meter, requests)
    p, q = before.table.log_softmax(-1), after.table.log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1).cpu().numpy()
    assert expected.mean() > 0.01
    found = meter.divergences["choices"]["kl"].to_numpy()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_packs_have_the_bits_of_the_classs_own_functions(dtype):
    fast = scorer(model_with("softmax", dtype), "fast")
    requests = choices(30)
    ours = ask(fast, requests)
    forward = fast.fast.forward
    norm, mlp = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP
    # put back
    assert {each.owner for each in forward.fused} == {masking_utils, modeling_llama, norm, mlp}
    assert all(getattr(each.owner, each.name) is each.original for each in forward.fused)
    forward.fused.clear()
    assert ours == ask(fast, requests)
