"""Analyses on a GPU: figures as on the CPU, decoding as transformers has it, memory of a pass."""

from pathlib import Path

import pytest
import torch
from loading import load_model
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.analysis.measure import measure
from qbench.attention.transformers import set_attention
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.evaluation.scoring.generate import Prompt, decode
from qbench.quantizers.linear import linears

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_a_gpu_measures_what_a_cpu_measures(normalizer):
    checkpoint = find(str(DEMO / normalizer))
    tokenizer = load_tokenizer(checkpoint)
    ids = torch.randint(3, 400, (4, 200), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        model = load_model(checkpoint, dtype=torch.float32, device=device, attention="reference")
        names = list(linears(model))
        found.append(measure(model, ids, tokenizer=tokenizer, linears=names, batch=2))
    ours, theirs = found
    assert theirs.perplexity == pytest.approx(ours.perplexity, rel=1e-4)
    assert theirs.zeros == pytest.approx(ours.zeros, abs=1e-3)
    assert theirs.sinks[0].rates_gu == pytest.approx(ours.sinks[0].rates_gu, abs=0.05)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert other.hidden.kurtosis == pytest.approx(one.hidden.kurtosis, rel=1e-3)
        assert other.hidden.quantiles == pytest.approx(one.hidden.quantiles, rel=1e-2, abs=1e-3)
        assert other.hidden.maximum == pytest.approx(one.hidden.maximum, rel=1e-3)
        masses = [[head.mass for head in layer.heads] for layer in (one, other)]
        assert masses[1] == pytest.approx(masses[0], rel=1e-3)
    for one, other in zip(ours.inputs, theirs.inputs, strict=True):
        assert other.rms == pytest.approx(one.rms, rel=2e-2)
    stretches = [[part.loss for part in each.stretches] for each in found]
    assert stretches[1] == pytest.approx(stretches[0], rel=1e-4)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_greedy_decoding_by_the_kernels_is_what_transformers_generates(normalizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        vocab_size=512, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda().eval().requires_grad_(False)
    set_attention(model, normalizer=normalizer)
    ids = torch.randint(3, 500, (7, 300)).tolist()
    expected = [
        model.generate(
            torch.tensor([one], device="cuda"),
            attention_mask=torch.ones(1, 300, dtype=torch.long, device="cuda"),
            max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
        )[0, 300:].tolist()
        for one in ids
    ]  # fmt: skip
    assert decode(model, [Prompt(ids=one, limit=6) for one in ids]) == expected
