"""Weights, activations and KV cache of few bits under every normalizer: quantized, and audited."""

import pytest
import torch
from normalizer_parameters import attach
from quantizer_models import check, llama, logits, make, settings

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.transformers import set_attention
from qbench.quantizers.registry import config_of

QUANTIZERS = {
    "gptq": settings("gptq-4bit"),
    "parts": config_of(
        {
            "weights": {"name": "rtn-4bit", "group_size": 32},
            "activations": "int8-token",
            "kv": "int4-token",
        },
        compute_dtype="float32",
    ),
}


def model_with(normalizer):
    model = attach(llama(), normalizer)
    set_attention(model, normalizer=normalizer)
    return model


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_a_model_is_quantized_and_passes_its_audit(normalizer, name, tmp_path):
    quantizer, original = QUANTIZERS[name], model_with(normalizer)
    before = logits(original)
    model = make(quantizer, tmp_path, model=model_with(normalizer))
    assert model.config._attn_implementation == f"qbench-{normalizer}-reference"
    report = check(model, quantizer, original)
    assert report.problems == ()
    assert report.logits_moved > 0
    assert (report.kv_cache is not None) == (name != "gptq")
    moved = logits(model) - before
    assert 0 < float(moved.square().mean().sqrt()) < float(before.std())
    for layer in model.model.layers:  # what it attends with is no weight matrix, and stays
        for parameter in NORMALIZERS.get(normalizer).parameters:
            if parameter.required:
                assert getattr(layer.self_attn, parameter.attribute).dtype == torch.float32
