"""Every quantizer on softmax and on softpick: audited, unchanged attention, more bits less harm."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from normalizer_parameters import attach
from plugins import toy_quantizer  # it registers sign-1bit
from quantizer_models import DIGEST, check, damage, llama, logits, make, parse, settings
from tiny import SPARSE_KEYS, tiny_model
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    quantize_,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.transformers import set_attention
from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers import config_of, hqq, packed
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.config import matching
from qbench.quantizers.noise_floor import ONE_IN, moved
from qbench.quantizers.quantize import quantize, shapes_of

CASES = [  # and bits per weight with scales and zeros
    ("bnb-4bit", {}, 4.5),
    ("bnb-4bit", {"quant_type": "fp4", "double_quant": True, "compute_dtype": "bfloat16"},
     4 + 8 / 64 + 32 / (64 * 256)),
    ("bnb-8bit", {"threshold": 0.5, "compute_dtype": "bfloat16"}, None),
    ("hqq-2bit", {"group_size": 16}, 2 + 2 * 32 / 16),
    ("hqq-3bit", {"axis": 0}, None),
    ("hqq-4bit", {"compute_dtype": "bfloat16"}, 4 + 2 * 16 / 32),
    ("hqq-8bit", {"optimize": False}, None),
    ("rtn-2bit", {"compute_dtype": "bfloat16"}, None),
    ("rtn-3bit", {}, 3 + (16 + 8) / 32),
    ("rtn-3bit", {"group_size": -1}, None),
    ("rtn-4bit", {"symmetric": True}, None),
    ("gptq-2bit", {}, None),
    ("gptq-3bit", {"compute_dtype": "bfloat16", "desc_act": True}, None),
    ("gptq-4bit", {"symmetric": False, "true_sequential": False, "group_aware": True}, None),
    ("gptq-8bit", {"group_size": -1, "batch_size": 3}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "bits", "normalizer"),
    [(*case, ("softmax", "softpick")[i % 2]) for i, case in enumerate(CASES)],
)
def test_every_quantizer_passes_its_audit_and_leaves_attention_alone(
    name, options, bits, normalizer, tmp_path
):
    chosen = settings(name, **options)
    dtype = getattr(torch, chosen.compute_dtype)
    original, model = (llama(normalizer, dtype=dtype, bias=True) for _ in range(2))
    quantized = make(chosen, tmp_path, model=model)
    report = check(quantized, chosen, original)
    assert report.problems == ()
    assert (report.passed, report.coverage) == (True, 1.0)
    assert report.levels <= 2**chosen.weights.num_bits
    if bits is not None:
        assert report.bits_per_weight == pytest.approx(bits, rel=0.01)
        beside = chosen.weights.shared_bits(*original.model.layers[0].mlp.up_proj.weight.shape)
        assert chosen.weights.num_bits + beside >= 0.99 * bits
    assert quantized.config._attn_implementation == f"qbench-{normalizer}-reference"
    assert quantized.model.layers[0].self_attn.q_proj.bias.abs().sum() > 1
    assert type(quantized.lm_head) is torch.nn.Linear
    assert torch.equal(quantized.lm_head.weight, original.lm_head.weight)
    assert torch.equal(quantized.model.embed_tokens.weight, original.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ["rtn-4bit", "hqq-4bit", "gptq-4bit"])
def test_a_group_size_that_does_not_divide_a_layer_is_named_with_the_way_out(name, tmp_path):
    with pytest.raises(QuantizationError) as raised:
        make(settings(name, group_size=64), tmp_path)
    assert str(raised.value) == (
        f"{name}: groups of 64 do not divide the inputs of model.layers.*.mlp.down_proj (160); "
        "without group_size one is taken that fits every layer, or set "
        "ignore: ['model.layers.*.mlp.down_proj']"
    )
    chosen = settings(name, group_size=64, ignore=("model.layers.*.mlp.down_proj",))
    report = check(make(chosen, tmp_path), chosen)
    assert report.problems == ()  # they are as they were
    assert report.left_out == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")


@pytest.mark.parametrize("name", ["rtn-4bit", "hqq-4bit", "gptq-4bit"])
def test_a_default_group_size_divides_every_layer_and_is_named(name, tmp_path):
    """Widths of 64 and 160: groups of 32; without the layers of 160, of 64."""
    chosen = config_of(name, compute_dtype="float32")
    shapes = shapes_of(llama())
    for ignore, size in (((), 32), (("down_proj",), 64)):
        fitted = replace(chosen, weights=replace(chosen.weights, ignore=ignore)).fitted(shapes)
        assert fitted.weights.group_size == size
        assert f"in groups of {size}" in fitted.precision.weights.scheme
    model = make(chosen, tmp_path)
    fitted = chosen.fitted(shapes)
    assert check(model, fitted).problems == ()
    assert fitted == config_of(f"{name}:group_size=32", compute_dtype="float32").fitted(shapes)
    wide = {"a": (8, 1024), "b": (128, 2816)}
    assert chosen.fitted(wide).weights.group_size == (64 if name == "hqq-4bit" else 128)
    assert chosen.fitted({"a": (576, 576), "b": (576, 1536)}).weights.group_size == 64  # SmolLM2
    odd = {"a": (8, 100)}
    assert chosen.fitted(odd).weights.group_size == (64 if name == "hqq-4bit" else -1)


def test_what_a_library_raises_becomes_one_line_with_the_quantizer(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(packed, "quantize", broken)
    with pytest.raises(QuantizationError, match=r"^rtn-4bit: RuntimeError: out of luck$"):
        make(settings("rtn-4bit"), tmp_path)


def test_a_cpu_quantizes_with_one_thread_and_progress_is_reported(tmp_path, monkeypatch):
    """The order of a sum depends on their number; a rounding decided the other way moves scores."""
    reported, seen, inner = [], [], packed.quantize
    monkeypatch.setattr(
        packed, "quantize", lambda *of: (seen.append(torch.get_num_threads()), inner(*of))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        quantize(
            llama(), settings("rtn-4bit"), calibration=None, digest=DIGEST, artifacts=tmp_path,
            progress=lambda *done: reported.append(done),
        )  # fmt: skip
        assert seen == [1] * 14
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [reported[0], reported[-1]] == [(0, 14), (1, 1)]


# What is built here equals what the libraries build on their own paths


def whole_blocks():
    """Of widths that bitsandbytes dequantizes rightly on every processor."""
    return llama(dtype=torch.bfloat16, intermediate=128)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_equals_loading_with_its_config(bits, tmp_path, monkeypatch):
    import bitsandbytes

    model = whole_blocks()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "original")
    # Else it repacks weights on processors with AVX512-BF16, and computes something else.
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **nf4)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "original", dtype=torch.bfloat16, quantization_config=config,
        attn_implementation="qbench-softmax-reference", device_map={"": "cpu"},
    )  # fmt: skip
    chosen = settings(f"bnb-{bits}bit", compute_dtype="bfloat16")
    assert torch.equal(logits(make(chosen, tmp_path, model=whole_blocks())), logits(theirs))


@pytest.mark.parametrize(("bits", "axis"), [(3, 0), (4, 1)])
def test_hqq_equals_its_model_wide_function(bits, axis, tmp_path):
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    theirs = llama()
    config = BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
    AutoHQQHFModel.quantize_model(theirs, config, compute_dtype=torch.float32, device="cpu")
    ours = make(settings(f"hqq-{bits}bit", axis=axis), tmp_path)
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("name", ["hqq-4bit", "hqq-3bit"])
def test_a_library_that_unpacks_other_codes_than_it_stored_is_caught(name, tmp_path, monkeypatch):
    """Two per cent: far within any bound on errors."""
    chosen, dequantize = settings(name), hqq.Layer.dequantize
    model = make(chosen, tmp_path)
    monkeypatch.setattr(hqq.Layer, "dequantize", lambda layer: dequantize(layer) * 1.02)
    report = check(model, chosen)
    assert len([p for p in report.problems if "0.02 off the stored ones" in p]) == 14


def test_weights_whose_hqq_scales_are_not_finite_are_named():
    layer = torch.nn.Linear(64, 8, bias=False)
    with torch.no_grad():  # finite, but their range is not
        layer.weight[:, ::2], layer.weight[:, 1::2] = 3e38, -3e38
    with pytest.raises(QuantizationError, match="hqq-4bit: layer: hqq gave scales that are not"):
        hqq.quantize("layer", layer, settings("hqq-4bit").weights)


# KL's noise floor: the unquantized model with noise of the size of rounding.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_twelfth_of_the_values_move_by_a_unit_in_the_last_place(dtype):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual = moved(x, 3)
    unit = torch.finfo(dtype).eps * 2.0 ** x.double().abs().log2().floor()
    steps = (actual.double() - x.double()) / unit
    changed = steps != 0
    assert float(changed.double().mean()) == pytest.approx(1 / ONE_IN, rel=0.05)
    assert float(steps.mean()) == pytest.approx(0, abs=0.01)
    assert float(steps.square().mean()) == pytest.approx(1 / 12, rel=0.06)
    assert torch.equal(moved(x[5:6], 3), actual[5:6])
    assert not torch.equal(moved(x, 4), actual)


def test_the_floor_lies_below_quantization_and_passes_the_audit(tmp_path):
    original = llama(dtype=torch.bfloat16)
    actual = {}
    for name in ("noise-floor", "rtn-8bit"):
        more = {"group_size": 32} if name == "rtn-8bit" else {}
        config = config_of({"name": name, **more}, compute_dtype="bfloat16")
        model = make(config, tmp_path)
        actual[name] = damage(model, original)
        result = audit(llama(dtype=torch.bfloat16), model, config, torch.arange(46).reshape(2, 23))
        assert result.problems == ()
        assert torch.equal(logits(model), logits(model))
    assert 0 < actual["noise-floor"] < actual["rtn-8bit"]


# Weights, activations and KV cache of few bits under every normalizer: quantized, and audited.


PARTS = config_of("gptq-4bit:group_size=32+int8-token+kv4", compute_dtype="float32")


def model_with(normalizer):
    model = attach(llama(), normalizer)
    set_attention(model, normalizer=normalizer)
    return model


QUICK = ("softmax", "softpick", "sigmoid", "scalable-softpick-next")


@pytest.mark.parametrize(
    "normalizer",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NORMALIZERS],
)
def test_a_model_is_quantized_and_passes_its_audit(normalizer, tmp_path):
    original = model_with(normalizer)
    before = logits(original)
    model = make(PARTS, tmp_path, model=model_with(normalizer))
    assert model.config._attn_implementation == f"qbench-{normalizer}-reference"
    report = check(model, PARTS, original)
    assert report.problems == ()
    assert report.logits_moved > 0
    assert report.kv_cache is not None
    moved = logits(model) - before
    assert 0 < float(moved.square().mean().sqrt()) < float(before.std())
    for layer in model.model.layers:  # what it attends with is no weight matrix, and stays
        for parameter in NORMALIZERS[normalizer].parameters:
            if parameter.required:
                assert getattr(layer.self_attn, parameter.attribute).dtype == torch.float32


# One file outside the package is enough for a new quantizer, and what the audit makes of modules


def test_its_settings_are_checked_keyed_and_explained():
    chosen = parse("sign-1bit", {"gain": 1})
    assert json.loads(json.dumps(chosen.to_dict())) == chosen.to_dict()
    assert (chosen.to_dict()["gain"], chosen.title) == (1.0, "Signs")
    with pytest.raises(RecipeError, match="gain must be less than 2, not 7"):
        parse("sign-1bit", {"gain": 7})
    with pytest.raises(RecipeError, match="sign has no 2-bit; it has 1"):
        parse("sign-2bit", {})


def test_its_own_file_is_part_of_its_key(tmp_path, monkeypatch):
    """The digest of qbench's modules does not know of it."""
    before, changed = parse("sign-1bit").to_dict(), tmp_path / "changed.py"
    changed.write_text(Path(toy_quantizer.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(toy_quantizer, "__file__", str(changed))
    assert parse("sign-1bit").to_dict()["source"] != before["source"]
    assert "source" not in parse("rtn-4bit").to_dict()


@pytest.mark.parametrize("config", [Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig])
def test_a_model_that_torchao_quantized_does_not_pass_for_an_unquantized_one(config):
    model = llama()
    body = lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name  # noqa: E731
    quantize_(model, config(set_inductor_config=False), filter_fn=body)
    report = check(model, parse("fp32"))
    assert len([line for line in report.problems if "not a plain weight in float32" in line]) == 14


# What a quantizer of weights must cover, however a model stores it, and what happens if not.


def test_a_pattern_that_names_nothing_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(QuantizationError) as raised:
        make(settings("rtn-4bit", ignore=("experts",)), tmp_path)
    assert "ignore: 'experts' matches no weight matrix" in str(raised.value)
    assert "gate_proj, up_proj, down_proj" in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("experts", {"a.0.mlp.experts.up"}), ("mlp.experts", {"a.0.mlp.experts.up"}),
        ("expert", set()), ("a.0.o", {"a.0.o"}), ("*.o", {"a.0.o", "a.1.o"}),
        ("a.[1-9].*", {"a.1.o"}),
    ],
)  # fmt: skip
def test_patterns_are_parts_of_names_or_whole_names_with_wildcards(pattern, expected):
    assert matching(["a.0.mlp.experts.up", "a.0.o", "a.1.o"], (pattern,)) == expected


@pytest.mark.parametrize("name", ["rtn-8bit:group_size=16", "bnb-8bit", "w8a8-int8"])
def test_what_a_class_keeps_in_float32_stays_so(name, tmp_path):
    """The indexer of DeepSeek V3.2 casts its input to the dtype of ``weights_proj``: codes of a
    quantized weight would make whole numbers of it."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk": 16}
    original = tiny_model("deepseek_v32", **{**SPARSE_KEYS, **sizes})
    chosen = config_of(name, compute_dtype="float32")
    report = check(make(chosen, tmp_path, model=copy.deepcopy(original)), chosen, original)
    kept = [f"model.layers.{layer}.self_attn.indexer.weights_proj" for layer in (0, 1)]
    assert [n for n in report.left_out if n in kept] == kept
    assert report.left_out_because[kept[0]] == "kept in float32 by its class"
    assert not [module for module in report.modules if module.name in kept]
    assert not [line for line in report.problems if "weights_proj" in line], report.problems
