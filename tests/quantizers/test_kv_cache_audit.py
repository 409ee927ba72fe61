"""What the audit measures of a KV cache, and the faults that it finds."""

import pytest
from kv_cache_models import SCHEMES, ids, model_of

from qbench.attention import transformers as transformers_attention
from qbench.attention.quantized_kv import KV_CACHE
from qbench.quantizers import fake_quant as rounding
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.audit.kv_cache import measure_kv
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of

BITS = {  # of a stored value: the code, and its share of scales and lowest values in float16
    "token": 4 + 16 / 16,
    "token, first": 3 + 16 / 16,
    "token in groups": 4 + 16 / 8,
    "fp8": 8 + 16 / 16,
}


@pytest.mark.parametrize("scheme", BITS)
def test_the_audit_counts_levels_and_bits(scheme):
    model = model_of("llama", "softpick", scheme)
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    audit, problems = measure_kv(model, quantizer, ids(2, 40))
    assert problems == []
    assert [m.name for m in audit.modules] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert 1 < audit.levels <= 2**quantizer.precision.kv_cache.bits
    assert audit.modules[0].bits_per_value == pytest.approx(BITS[scheme])
    assert 0 < audit.key_error < 0.6
    assert audit.unquantized_bytes_per_token == 2 * 2 * 2 * 16 * 2  # layers, K and V, heads
    part = SCHEMES[scheme]
    older = 128 - part.get("sink_tokens", 0)
    stored = (older * BITS[scheme] + (128 - older) * 16) / 128
    assert audit.bits_per_value == pytest.approx(stored)
    assert audit.bytes_per_token == pytest.approx(stored * 2 * 2 * 2 * 16 / 8)


_fake_quantize = rounding.fake_quantize
FAULTS = {  # what the audit says: a broken rounding, and the scheme
    "levels share a scale, 3 bits have 8": (
        lambda x, form, fixed=None: _fake_quantize(x, QuantFormat(num_bits=4), fixed),
        "token, first"),
    "its keys differ from their rounding to int4": (
        lambda x, form, fixed=None: _fake_quantize(x.clamp(-0.5, 0.5), form), "token"),
    "its values differ from their rounding to int4": (
        lambda x, form, fixed=None: _fake_quantize(x, form).roll(1, -1), "token in groups"),
    "nothing was quantized": (lambda x, form, fixed=None: x, "fp8"),
}  # fmt: skip


@pytest.mark.parametrize("words", FAULTS)
def test_the_audit_finds_a_broken_rounding(words, monkeypatch):
    broken, scheme = FAULTS[words]
    model = model_of("llama", "softmax", scheme)
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    monkeypatch.setattr(rounding, "fake_quantize", broken)
    assert any(words in line for line in measure_kv(model, quantizer, ids(2, 40))[1])


def test_the_audit_finds_other_bits_than_the_settings_say():
    model = model_of("llama", "softmax", "token, first")
    quantizer = config_of({"kv": "int8-token"}, compute_dtype="float32")
    assert measure_kv(model, quantizer, ids(2, 40))[1] == [
        f"model.layers.{i}.self_attn: its KV cache has 3 bits, the settings say 8" for i in (0, 1)
    ]


def test_the_audit_finds_an_attention_without_a_cache():
    model = model_of("llama", "softmax", "token")
    quantizer = config_of({"kv": SCHEMES["token"]}, compute_dtype="float32")
    delattr(model.model.layers[1].self_attn, KV_CACHE)
    problems = measure_kv(model, quantizer, ids(2, 40))[1]
    assert problems == ["model.layers.1.self_attn: its KV cache is not quantized"]


def test_a_cell_whose_cache_is_no_cache_fails(monkeypatch):
    model = model_of("llama", "softmax", "token")
    quantizer = config_of({"kv": SCHEMES["token"]}, compute_dtype="float32")
    passed = audit(model_of(), model, quantizer, ids(2, 40))
    assert passed.problems == ()
    assert 8 < passed.kv_cache.levels <= 15
    monkeypatch.setattr(rounding, "fake_quantize", lambda x, form, fixed=None: x)
    failed = audit(model_of(), model, quantizer, ids(2, 40))
    assert not failed.passed
    assert any("nothing was quantized" in line for line in failed.problems)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("name", ["int4-tensor", "int8-tensor", "fp8-tensor"])
def test_one_scale_of_a_tensor_is_that_of_all_rows_and_tokens(name, sinks):
    """The largest key and value stand in the second row, at the last token."""
    quantizer = config_of({"kv": {"name": name, "sink_tokens": sinks}}, compute_dtype="float32")
    model = apply(model_of(), quantizer, {})
    probe = ids(2, 40)
    probe[probe == 3] = 4
    probe[1, -1] = 3
    model.get_input_embeddings().weight.data[3] *= 30
    for block in model.model.layers:
        block.input_layernorm.forward = lambda x: x
    assert measure_kv(model, quantizer, probe)[1] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "int2-token"},
        {"name": "int4-token", "sink_tokens": 20},
        {"name": "int8-token", "sink_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_an_attention_that_reads_unquantized_keys_and_values_fails(
    monkeypatch, settings, normalizer
):
    """The rounded ones are made, and right, but no query reads them."""
    quantizer = config_of({"kv": settings}, compute_dtype="float32")
    model = apply(model_of(normalizer=normalizer), quantizer, {})
    assert measure_kv(model, quantizer, ids(2, 40))[1] == []
    monkeypatch.setattr(transformers_attention, "read", _unquantized)
    problems = measure_kv(model, quantizer, ids(2, 40))[1]
    assert any("attention's output differs by" in line for line in problems)


_read = transformers_attention.read


def _unquantized(cache, module, key, value, **options):
    _read(cache, module, key, value, **options)
    return key, value
