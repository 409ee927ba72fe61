"""Cells with a treatment of outliers: any weight quantizer on the treated model, audited."""

import pytest
import torch
from quantizer_models import calibration, check, damage, ids, logits
from quantizer_models import make as quantized
from treated_models import decoder

from qbench.errors import RecipeError
from qbench.quantizers import config_of, rotation, scaled_linear
from qbench.quantizers.hadamard import factors
from qbench.quantizers.methods.equal_models import Rotation, SmoothQuant
from qbench.quantizers.quantize import backend
from qbench.quantizers.registry import settings_of
from qbench.quantizers.rotation import hadamard_transform

ROUNDED, CALIBRATED = "rtn-4bit:group_size=16+rotation:seed=5", "gptq-4bit:group_size=16"


def quantizer(text, dtype="float32"):
    return config_of(f"{text}+int8-token", compute_dtype=dtype)


def make(chosen, folder, which="llama-biases", normalizer="softmax"):
    dtype = getattr(torch, chosen.compute_dtype)
    return quantized(chosen, folder, model=decoder(which, normalizer, dtype=dtype))


def judged(chosen, model, which="llama-biases", normalizer="softmax"):
    dtype = getattr(torch, chosen.compute_dtype)
    return check(model, chosen, decoder(which, normalizer, dtype=dtype))


@pytest.mark.parametrize(
    ("text", "which", "normalizer", "dtype"),
    [*((text, "llama-wide", "softmax", "float32") for text in (
        "rotation:seed=5", f"{CALIBRATED}+smoothquant", ROUNDED, "bnb-4bit+rotation:seed=5",
        "hqq-4bit:group_size=16+smoothquant")),
     (f"{CALIBRATED}+rotation:seed=5", "llama-tied", "softpick", "bfloat16"),
     (f"{CALIBRATED}+smoothquant", "qwen3-head-norms", "softpick", "bfloat16")],
)  # fmt: skip
def test_every_weight_quantizer_passes_its_audit_on_the_treated_model(
    text, which, normalizer, dtype, tmp_path
):
    chosen = quantizer(text, dtype)
    report = judged(chosen, make(chosen, tmp_path, which, normalizer), which, normalizer)
    assert report.problems == ()
    assert report.coverage == (0.0 if chosen.weights is None else 1.0)
    assert 0 < report.treatment_error < (1e-5 if dtype == "float32" else 0.05)
    assert report.weight_error < 0.2


@pytest.mark.parametrize("part", ["model.layers.1.input_layernorm", "lm_head"])
def test_a_part_that_is_not_the_treated_original_fails(part, tmp_path):
    chosen = quantizer(ROUNDED)
    model = make(chosen, tmp_path)
    model.get_submodule(part).weight.data[0] += 0.5
    report = judged(chosen, model)
    assert any("not what the transform" in line for line in report.problems)


def test_a_treatment_that_changes_the_function_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(rotation, "_values", lambda *of: of[0].v_proj.weight.data.mul_(1.01))
    chosen = quantizer(ROUNDED)
    report = judged(chosen, make(chosen, tmp_path))
    assert any("the transform moved" in line for line in report.problems)


# Weights as codes times scales pass their audit, and equal those of compressed-tensors.


BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp8": 8.25}


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("int8-row", "float32"), ("fp8", "bfloat16"), ("fp8-matrix", "float32"),
     ("nvfp4", "float32"), ("mxfp4", "bfloat16"), ("mxfp8", "float32")],
)  # fmt: skip
def test_codes_times_scales_are_weight_quantizers_on_their_own(weights, dtype, tmp_path):
    chosen = config_of({"name": weights}, compute_dtype=dtype)
    model = make(chosen, tmp_path, "llama-wide")
    report = judged(chosen, model, "llama-wide")
    assert report.problems == ()
    bits = BITS.get(weights, 8)
    assert report.levels <= 2 ** int(bits)
    assert bits <= report.bits_per_weight < bits + 0.8
    moved = damage(model, decoder("llama-wide", dtype=getattr(torch, dtype)))
    assert moved < (0.1 if bits >= 8 else 0.5)


PRESETS = {
    "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "mxfp8": "MXFP8A16", "fp8-row": "FP8_DYNAMIC",
    "int8-row": "INT8",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_weights_are_those_of_compressed_tensors_to_the_bit(name, spread):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = quantization.preset_name_to_scheme(PRESETS[name], ["Linear"]).weights
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)) * spread
    weight[:, 32:64] *= torch.logspace(-3, 3, 48)[:, None]
    weight[3, 64:] = 0
    weight[4, :16] = torch.tensor([6.0, 1.75, 1.25, 0.25, -0.75, 2.5, 5.0, 3.5] * 2)  # ties
    groups = weight.unflatten(1, (-1, args.group_size or 128))
    whole = generate_gparam(weight.min(), weight.max()) if name == "nvfp4" else None
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    expected = fake_quantize(weight, scale.float(), zero, args, global_scale=whole)
    layer = torch.nn.Linear(128, 48, bias=False)
    layer.weight.data = weight
    settings = settings_of(name)
    tensors = scaled_linear.quantize("layer", layer, settings)
    made = scaled_linear.from_packed(layer, tensors, settings)
    assert torch.equal(made.dequantize(), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_weights_that_are_all_zero_stay_zero(name):
    layer = torch.nn.Linear(128, 48, bias=False)
    torch.nn.init.zeros_(layer.weight)
    settings = settings_of(name)
    tensors = scaled_linear.quantize("layer", layer, settings)
    made = scaled_linear.from_packed(layer, tensors, settings).dequantize()
    assert torch.equal(made, layer.weight)


# Transformed models compute what they did: SmoothQuant and rotation, folded into weights.


TEXT = ids(3, 2, 40)
FOLDED = {
    "smoothquant": SmoothQuant(),
    "smoothquant-paper": SmoothQuant(layers=("attention", "mlp")),
    "smoothquant-alpha": SmoothQuant(alpha=0.8, layers=("o_proj", "down_proj")),
    "rotation": Rotation(),
    "rotation-offline": Rotation(online=False, seed=3),
}


def calibrated(settings, model):
    if not settings.needs_calibration:
        return {}
    return backend(settings).calibrate(model, settings, calibration(), lambda *_: None)


@pytest.mark.parametrize(
    ("which", "normalizer"),
    [("llama-tied", "softmax"), ("qwen3-head-norms", "softmax"), ("llama-biases", "softpick"),
     ("smollm3-without-rope", "softmax")],
)  # fmt: skip
@pytest.mark.parametrize("name", FOLDED)
def test_a_transformed_model_gives_the_same_logits(name, which, normalizer):
    """Within 1e-5 of their norm in float32, whose rounding alone gives about 1e-6."""
    chosen, model = FOLDED[name], decoder(which, normalizer)
    before = logits(model, TEXT)
    backend(chosen).transform(model, chosen, calibrated(chosen, model))
    assert (logits(model, TEXT) - before).norm() / before.norm() < 1e-5


def test_smoothing_keeps_channels_that_calibration_never_reaches():
    """A head of softpick can be silent on all text; its scale would be next to nothing."""
    model = decoder("llama")
    model.model.layers[1].self_attn.v_proj.weight[:12] = 0
    scales = calibrated(SmoothQuant(), model)["model.layers.1.o_proj"]
    assert torch.equal(scales[:12], torch.ones(12))
    assert (scales[12:] != 1).all()


@pytest.mark.parametrize(
    ("outliers", "config", "words"),
    [
        ("smoothquant", {"model_type": "gemma2"}, "the blocks of gemma2 models .*; leave the tra"),
        ("rotation", {"hidden_size": 50}, "hidden_size 50: no Hadamard matrix .*; leave the tra"),
        (
            "rotation",
            {"hidden_size": 48, "num_attention_heads": 8},
            "head_dim 6: .*; leave the tra",
        ),
        ("rotation", {"intermediate_size": 92}, "intermediate_size 92: .*; set online: false"),
    ],
)
def test_what_can_be_seen_in_a_config_is_refused_before_work(outliers, config, words):
    entry = {"activations": "int8-token", "outliers": outliers}
    chosen = config_of(entry, compute_dtype="float32").transform
    with pytest.raises(RecipeError, match=f"^transform: {outliers}: {words}"):
        chosen.check({"model_type": "qwen2", **config}, "cpu")


# Head widths, hidden and intermediate sizes of models, and small orders of each construction.
ORDERS = [1, 2, 8, 12, 20, 28, 36, 44, 64, 148, 384, 640]


@pytest.mark.parametrize("order", ORDERS)
def test_a_transform_is_a_hadamard_matrix_over_the_root_of_its_order(order):
    identity = torch.eye(order, dtype=torch.float64)
    matrix = hadamard_transform(identity)
    assert torch.equal((matrix * order**0.5).round().abs(), torch.ones_like(matrix))
    torch.testing.assert_close(matrix @ matrix.T, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [3, 6, 50, 92, 344, 1001])
def test_orders_without_a_known_matrix_are_none(order):
    assert factors(order) is None
