"""Cells with a treatment of outliers: any weight quantizer on the treated model, audited."""

import pytest
import torch
from quantizer_models import check
from quantizer_models import make as quantized
from treated_models import decoder

from qbench.quantizers import config_of, rotation

GPTQ = {"name": "gptq-4bit", "group_size": 16}
WEIGHTS = {
    "unquantized": None,
    "gptq": GPTQ,
    "rtn": {"name": "rtn-4bit", "group_size": 16},
    "hqq": {"name": "hqq-4bit", "group_size": 16},
    "bnb": "bnb-4bit",
}
TRANSFORMS = {"smoothquant": "smoothquant", "rotation": {"name": "rotation", "seed": 5}}


def quantizer(weights, outliers, activations="int8-token", dtype="float32"):
    entry = {"weights": weights, "activations": activations, "outliers": outliers}
    return config_of({k: v for k, v in entry.items() if v is not None}, compute_dtype=dtype)


def make(chosen, folder, which="llama-biases", normalizer="softmax"):
    dtype = getattr(torch, chosen.compute_dtype)
    return quantized(chosen, folder, model=decoder(which, normalizer, dtype=dtype))


def judged(chosen, model, which="llama-biases", normalizer="softmax"):
    dtype = getattr(torch, chosen.compute_dtype)
    return check(model, chosen, decoder(which, normalizer, dtype=dtype))


@pytest.mark.parametrize(
    ("weights", "outliers"),
    [("unquantized", "rotation"), ("gptq", "smoothquant"), ("rtn", "rotation"), ("bnb", "rotation"),
     ("hqq", "smoothquant")],
)  # fmt: skip
def test_every_weight_quantizer_passes_its_audit_on_the_treated_model(weights, outliers, tmp_path):
    which = "llama-wide"
    chosen = quantizer(WEIGHTS[weights], TRANSFORMS[outliers])
    report = judged(chosen, make(chosen, tmp_path, which), which)
    assert report.problems == ()
    assert report.coverage == (0.0 if weights == "unquantized" else 1.0)
    assert report.treatment_error < 1e-5
    assert report.weight_error < 0.2


@pytest.mark.parametrize(
    ("which", "outliers"), [("llama-tied", "rotation"), ("qwen3-head-norms", "smoothquant")]
)
def test_other_classes_and_tied_heads_pass_in_bfloat16(which, outliers, tmp_path):
    chosen = quantizer(WEIGHTS["gptq"], TRANSFORMS[outliers], dtype="bfloat16")
    report = judged(chosen, make(chosen, tmp_path, which, "softpick"), which, "softpick")
    assert report.problems == ()
    assert 0 < report.treatment_error < 0.05


@pytest.mark.parametrize("part", ["norm", "head"])
def test_a_part_that_is_not_the_treated_original_fails(part, tmp_path):
    chosen = quantizer(WEIGHTS["rtn"], TRANSFORMS["rotation"])
    model = make(chosen, tmp_path)
    tensor = {
        "norm": model.model.layers[1].input_layernorm.weight,
        "head": model.lm_head.weight,
    }[part]
    tensor.data[0] += 0.5
    report = judged(chosen, model)
    assert any("not what the transform" in line for line in report.problems)


def test_a_treatment_that_changes_the_function_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(rotation, "_values", lambda *of: of[0].v_proj.weight.data.mul_(1.01))
    chosen = quantizer(WEIGHTS["rtn"], TRANSFORMS["rotation"])
    report = judged(chosen, make(chosen, tmp_path))
    assert any("the transform moved" in line for line in report.problems)
