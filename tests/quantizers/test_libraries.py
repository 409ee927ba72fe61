"""What is built here equals what the libraries build on their own paths."""

import importlib
import logging
import os
import sys

import pytest
import torch
from quantizer_models import (
    DIGEST,
    PROBE,
    calibration,
    damage,
    llama,
    logits,
    make,
    packed_layer,
    settings,
    unpacked,
)
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from qbench.errors import QuantizationError
from qbench.quantizers import gptq_library
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.linear import linears, plain
from qbench.quantizers.quantize import quantize


@pytest.fixture
def saved(tmp_path):
    model = whole_blocks()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "original")
    return tmp_path / "original"


def whole_blocks():
    """Of widths that bitsandbytes dequantizes rightly on every processor."""
    return llama(dtype=torch.bfloat16, intermediate=128)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "bnb-4bit",
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": torch.bfloat16,
            },
        ),
        ("bnb-8bit", {"load_in_8bit": True, "llm_int8_threshold": 6.0}),
    ],
)
def test_bitsandbytes_equals_loading_with_its_config(name, config, saved, tmp_path, monkeypatch):
    import bitsandbytes

    # Else it repacks weights on processors with AVX512-BF16, and computes something else.
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    theirs = AutoModelForCausalLM.from_pretrained(
        saved,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(**config),
        attn_implementation="qbench-softmax-reference",
        device_map={"": "cpu"},
    )
    chosen = settings(name, compute_dtype="bfloat16")
    ours = make(chosen, tmp_path, model=whole_blocks()).model
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize(("bits", "axis"), [(2, 1), (3, 0), (4, 1), (8, 0)])
def test_hqq_equals_its_model_wide_function(bits, axis, tmp_path):
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    theirs = llama()
    AutoHQQHFModel.quantize_model(
        theirs,
        quant_config=BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis),
        compute_dtype=torch.float32,
        device="cpu",
    )
    ours = make(settings(f"hqq-{bits}bit", axis=axis), tmp_path).model
    assert torch.equal(logits(ours), logits(theirs))


def through_the_library(tmp_path, normalizer="softpick", **stated):
    chosen = settings("gptq-4bit", **stated)
    dtype = getattr(torch, chosen.compute_dtype)
    made = quantize(
        llama(normalizer, dtype=dtype),
        chosen,
        calibration=calibration(),
        digest=DIGEST,
        artifacts=tmp_path,
    )
    return chosen, made


def test_gptq_through_the_library_passes_its_audit_and_agrees_with_our_own(tmp_path, capfd):
    level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
    chosen, made = through_the_library(tmp_path)
    assert "gptqmodel" in made.detail
    assert made.model.config._attn_implementation == "qbench-softpick-reference"
    assert getattr(made.model.config, "quantization_config", None) is None
    assert (logging.getLogger().level, logging.getLogger().handlers) == (level, handlers)
    assert "GPT-QModel" not in "".join(capfd.readouterr())

    report = audit(llama("softpick"), made.model, chosen, PROBE)
    assert report.problems == ()
    assert {module.kind for module in report.modules} == {"TorchLinear"}

    own = make(settings("gptq-4bit"), tmp_path, "softpick").model
    rounded = make(settings("rtn-4bit", symmetric=True), tmp_path, "softpick").model
    text, original = calibration(seed=5).ids, llama("softpick")
    theirs, ours, plain = (damage(m, original, text) for m in (made.model, own, rounded))
    assert theirs == pytest.approx(ours, rel=0.25)
    assert max(theirs, ours) < plain

    again = through_the_library(tmp_path)[1]
    assert again.detail.startswith("artifact reused")
    assert torch.equal(logits(again.model), logits(made.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stated",
    [
        {"symmetric": False, "desc_act": True, "compute_dtype": "bfloat16"},
        {"group_aware": True, "group_size": 16, "batch_size": 3},
        {"group_size": -1, "true_sequential": False},
    ],
)
def test_gptq_through_the_library_obeys_its_settings(stated, tmp_path):
    chosen, made = through_the_library(tmp_path, **stated)
    original = llama("softpick", dtype=getattr(torch, chosen.compute_dtype))
    report = audit(original, made.model, chosen, PROBE)
    assert report.problems == ()
    plain = make(settings("gptq-4bit"), tmp_path, "softpick").model
    assert not torch.equal(logits(plain), logits(made.model))


def test_the_library_is_given_exactly_the_calibration_tokens(tmp_path):
    model, seen = llama(), []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, x: seen.append(x[0].clone()))
    quantize(
        model,
        settings("gptq-8bit"),
        calibration=calibration(),
        digest=DIGEST,
        artifacts=tmp_path,
    )
    rows = torch.cat(seen)
    looks = len(rows) - len(calibration().ids)  # of our own, before the library's
    assert torch.equal(rows[looks:], calibration().ids)
    assert torch.isin(rows[:looks], calibration().ids).all()


@pytest.mark.parametrize(
    ("model", "stated", "parts"),
    [
        ({}, {"group_size": 8}, ["no group_size 8; it has -1, 16, 32", "backend: torch"]),
        ({"intermediate": 168}, {"group_size": -1}, ["168 outputs", "multiples of 32"]),
    ],
)
def test_shapes_that_the_library_refuses_are_named_with_the_way_round(
    model, stated, parts, tmp_path
):
    with pytest.raises(QuantizationError) as raised:
        quantize(
            llama(**model),
            settings("gptq-4bit", **stated),
            calibration=calibration(),
            digest=DIGEST,
            artifacts=tmp_path,
        )
    for part in parts:
        assert part in str(raised.value)


def test_damping_that_the_library_raised_is_told(tmp_path, monkeypatch):
    from gptqmodel.quantization import GPTQ

    inner = GPTQ.hessian_inverse
    monkeypatch.setattr(GPTQ, "hessian_inverse", lambda self, h: (inner(self, h)[0], 0.25))
    assert "damp raised to 0.25 in 14 layers" in through_the_library(tmp_path)[1].detail


def test_falling_back_to_plain_rounding_is_refused(tmp_path, monkeypatch):
    from gptqmodel.quantization import GPTQ

    monkeypatch.setattr(GPTQ, "hessian_inverse", lambda self, h: (None, 0.01))
    with pytest.raises(QuantizationError, match="no regular Hessian"):
        through_the_library(tmp_path)


def test_importing_the_library_leaves_the_environment_alone(monkeypatch):
    """One of its parts moves Hugging Face's cache to /tmp for all that comes later."""
    gptq_library._library("tokenicer")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    monkeypatch.delitem(sys.modules, "tokenicer")
    importlib.import_module("tokenicer")
    assert os.environ["HF_HOME"].startswith("/tmp")
    for name in set(os.environ) - set(before):
        del os.environ[name]
    monkeypatch.delitem(sys.modules, "tokenicer")
    gptq_library._library("tokenicer")
    assert dict(os.environ) == before


def test_what_the_root_logger_was_is_put_back():
    root = logging.getLogger()
    level, handlers, added = root.level, list(root.handlers), logging.NullHandler()
    with gptq_library.silenced():
        root.setLevel(logging.INFO)
        root.addHandler(added)
        print("a banner")
    assert (root.level, root.handlers) == (level, handlers)


def test_int8_outlier_columns_are_computed_unquantized(tmp_path):
    """Above the threshold a column is a float16 product of the dequantized weight."""
    import bitsandbytes

    model = make(settings("bnb-8bit", threshold=2.0, compute_dtype="bfloat16"), tmp_path).model
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, bitsandbytes.nn.Linear8bitLt)
    assert isinstance(layer, nn.Linear)
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[:, 3], x[:, 5] = 100.0, 0.01
    first = layer(x).float()
    x[:, 3] = 0
    small = layer(x).float()
    x[:, 3], x[:, 5] = 100.0, 0
    large = layer(x).float()
    # 0.01 beside 100 is lost in int8 (a step is 0.79); beside an outlier column it is not.
    torch.testing.assert_close(first - large, small, rtol=0.2, atol=large.abs().max() * 2**-8)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stated", [{"axis": 0}, {"axis": 1, "group_size": 16}])
def test_decoding_hqq_ourselves_gives_what_the_library_gives(bits, stated):
    chosen = settings(f"hqq-{bits}bit", **stated)
    layer = linears(llama())["model.layers.0.mlp.down_proj"]  # [64, 160]
    module = packed_layer(chosen, layer)
    torch.testing.assert_close(unpacked(module, chosen).dequantize(), module.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stated", [{}, {"symmetric": False, "desc_act": True}])
def test_decoding_gptq_ourselves_gives_what_the_library_gives(bits, stated):
    draw = torch.Generator().manual_seed(bits)
    chosen = settings(f"gptq-{bits}bit", **stated)
    layer = linears(llama())["model.layers.0.mlp.down_proj"]
    words = torch.iinfo(torch.int32)
    tensors = {
        "qweight": torch.randint(words.min, words.max, (160 * bits // 32, 64), generator=draw),
        "qzeros": torch.randint(words.min, words.max, (5, 64 * bits // 32), generator=draw),
        "scales": torch.rand(5, 64, generator=draw).half(),
        "g_idx": torch.randperm(160, generator=draw) // 32,
    }
    tensors |= {name: tensors[name].int() for name in ("qweight", "qzeros", "g_idx")}
    module = chosen.rebuild(plain(layer), tensors)
    ours, theirs = unpacked(module, chosen).dequantize(), module.dequantize_weight().T.float()
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-3)  # theirs in float16


@pytest.mark.parametrize("name", ["hqq-4bit", "hqq-3bit", "gptq-4bit"])
def test_a_library_that_unpacks_other_codes_than_it_stored_is_caught(name, tmp_path, monkeypatch):
    """Two per cent: far within any bound on errors."""
    chosen = settings(name)
    model = make(chosen, tmp_path).model
    for layer in linears(llama()):
        module = model.get_submodule(layer)
        method = "dequantize" if name.startswith("hqq") else "_dequantize_weight_cached_248"
        inner = getattr(module, method)
        monkeypatch.setattr(module, method, lambda *a, inner=inner, **k: inner(*a, **k) * 1.02)
    report = audit(llama(), model, chosen, PROBE)
    assert len([p for p in report.problems if "0.02 off the stored ones" in p]) == 14
