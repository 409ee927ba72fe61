"""A KV cache of few bits in whole models: scoring, generating, auditing, refusing."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qbench.attention.interface import attend
from qbench.errors import QuantizationError, RecipeError, UnavailableError
from qbench.quantizers.audit import audit
from qbench.quantizers.kv_cache import rounding
from qbench.quantizers.kv_cache.audit import measure_kv
from qbench.quantizers.kv_cache.cache import ATTRIBUTE
from qbench.quantizers.parts import KV_CACHES, quantizer_of

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),  # norms its keys before RoPE
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)),
}
SCHEMES = {
    "token": {"name": "int4-token"},
    "token, first and recent": {"name": "int3-token", "keep_first": 2, "keep_recent": 5},
    "fp8": {"name": "fp8-token", "keep_first": 1},
    "kivi": {"name": "int4-channel", "group_size": 4, "keep_recent": 3},
    "kivi before RoPE": {
        "name": "int2-channel", "group_size": 8, "before_rope": True, "keep_first": 1,
    },
    "token before RoPE": {"name": "int4-token", "before_rope": True, "group_size": 8},
}  # fmt: skip


def model_of(kind="llama", normalizer="softmax", scheme=None):
    torch.manual_seed(0)
    model = MODELS[kind]().eval().requires_grad_(False)
    attend(model, normalizer=normalizer, implementation="reference")
    if scheme is None:
        return model
    quantizer = quantizer_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    return quantizer.apply(model, {})


def ids(*shape, seed=0):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(found, expected):
    # rounding differs with shapes, and may take a value over the border between two codes
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


CASES = [
    *(
        (scheme, "llama", normalizer)
        for scheme in SCHEMES
        for normalizer in ("softmax", "softpick")
    ),
    *((scheme, "qwen3", "softmax") for scheme in SCHEMES if "RoPE" in scheme),
    *((scheme, "mistral", "softpick") for scheme in SCHEMES if "kivi" not in scheme),
]


@pytest.mark.parametrize(("scheme", "kind", "normalizer"), CASES)
def test_generation_attends_to_what_scoring_attends_to(scheme, kind, normalizer):
    model = model_of(kind, normalizer, scheme)
    long, short = ids(1, 17), ids(1, 11, seed=1)
    prompt = torch.zeros(2, 17, dtype=torch.long)
    prompt[0], prompt[1, 6:] = long, short
    made = model.generate(
        prompt, attention_mask=(prompt > 0).long(), max_new_tokens=20, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    steps = torch.stack(made.logits, dim=1)
    for row, start in ((0, 0), (1, 6)):
        text = made.sequences[row : row + 1, start:]
        scored = model(text, use_cache=False).logits[:, -21:-1]
        assert_equal(steps[row : row + 1], scored)
    plain = model_of(kind, normalizer)(text, use_cache=False).logits[:, -21:-1]
    assert (plain - scored).abs().max() > 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_texts_score_as_they_do_alone(scheme):
    model = model_of("llama", "softpick", scheme)
    first, second = ids(1, 13), ids(1, 22, seed=3)
    positions = torch.cat([torch.arange(13), torch.arange(22)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    assert_equal(packed[:, :13], model(first, use_cache=False).logits)
    assert_equal(packed[:, 13:], model(second, use_cache=False).logits)


def test_a_sliding_window_refuses_groups_of_tokens():
    with pytest.raises(RecipeError, match="drops tokens from the middle of a group"):
        KV_CACHES.parse("int4-channel", {"group_size": 8}).check(
            MistralConfig(**SHAPE).to_dict(), "cpu"
        )


def test_scales_of_a_tensor_are_declared():
    quantizer = quantizer_of({"kv": "int4-tensor"}, compute_dtype="float32")
    assert quantizer.mixes_batches
    assert quantizer.sees_future
    assert not quantizer_of({"kv": "int4-channel"}, compute_dtype="float32").mixes_batches


@pytest.mark.parametrize(
    ("entry", "amplifies"),
    [
        ({"name": "rtn-4bit"}, False),
        ({"name": "fp32"}, False),
        ({"kv": "int8-token"}, True),
        ({"activations": "int8-token"}, True),
        ({"weights": "rtn-4bit", "kv": "fp8-token"}, True),
    ],
)
def test_what_is_rounded_while_a_model_runs_amplifies_rounding(entry, amplifies):
    assert quantizer_of(entry, compute_dtype="float32").amplifies_rounding == amplifies


REFUSED = {
    "group_size 5 does not divide": ("int4-token", {"group_size": 5}),
    "group_size 32 does not divide this checkpoint's head width 16": ("int4-channel", {}),
    "keep_recent 128 leave nothing of this checkpoint's 128 tokens": (
        "int4-token", {"keep_recent": 128},
    ),
    "keep_first 100, keep_recent 20 and a group of 16": (
        "int2-channel", {"group_size": 16, "keep_first": 100, "keep_recent": 20},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_checkpoint_cannot_have_is_refused_before_it_is_loaded(message):
    name, options = REFUSED[message]
    with pytest.raises(RecipeError, match=message) as refused:
        KV_CACHES.parse(name, options).check(LlamaConfig(**SHAPE).to_dict(), "cpu")
    assert "\n" not in str(refused.value)


def test_the_head_width_is_found_without_being_stated():
    config = {"hidden_size": 48, "num_heads": 4, "max_position_embeddings": 64}
    KV_CACHES.parse("int4-token", {"group_size": 6}).check(config, "cpu")
    with pytest.raises(RecipeError, match="head width 12"):
        KV_CACHES.parse("int4-token", {"group_size": 8}).check(config, "cpu")


def test_latent_attention_is_refused():
    with pytest.raises(RecipeError, match="latent"):
        KV_CACHES.parse("int4-token").check({"kv_lora_rank": 512}, "cpu")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int4-token", {"keep_first": -1}, "keep_first must be a whole number of at least 0"),
        ("int4-token", {"keep_recent": 1e9}, "keep_recent must be"),
        ("int4-token", {"group_size": 0}, "group_size must be"),
        ("int4-channel", {"group_size": -1}, "group_size must be a whole number of at least 2"),
        ("int4-tensor", {"group_size": 8}, "unknown option 'group_size'"),
        ("fp8-token", {"symmetric": False}, "unknown option 'symmetric'"),
        ("int5-token", {}, "unknown KV cache quantizer"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(name, options, message):
    with pytest.raises(RecipeError, match=message):
        KV_CACHES.parse(name, options)


def test_attention_that_reads_no_cache_is_refused():
    torch.manual_seed(0)
    model = MODELS["llama"]()
    with pytest.raises(QuantizationError, match="only attention of qbench"):
        quantizer_of({"kv": "int4-token"}, compute_dtype="float32").apply(model, {})


def test_a_rotation_that_is_another_one_is_found():
    model = model_of("llama", "softmax", "kivi before RoPE")
    for layer in model.model.layers:
        layer.self_attn.qbench_rotation = lambda x: x.flip(-1)
    with pytest.raises(UnavailableError, match="are not its key projection turned"):
        model(ids(1, 9), use_cache=False)


BITS = {  # of a stored value: the code, and its share of scales and lowest values in float16
    "token": 4 + 16 / 16,
    "kivi": 4 + 32 / 4,
    "kivi before RoPE": 2 + 32 / 8,
    "token before RoPE": 4 + 16 / 8,
    "fp8": 8 + 16 / 16,
}


@pytest.mark.parametrize("scheme", BITS)
def test_the_audit_counts_levels_and_bits(scheme):
    model = model_of("llama", "softpick", scheme)
    quantizer = quantizer_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    audit, problems = measure_kv(model, quantizer, ids(2, 40))
    assert problems == []
    assert [m.name for m in audit.modules] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert 1 < audit.levels <= 2**quantizer.precision.kv_cache.bits
    assert audit.modules[0].bits_per_value == pytest.approx(BITS[scheme])
    assert 0 < audit.key_error < 0.6
    assert audit.unquantized_bytes_per_token == 2 * 2 * 2 * 16 * 2  # layers, K and V, heads
    part = SCHEMES[scheme]
    spared = part.get("keep_first", 0) + part.get("keep_recent", 0)
    group = part.get("group_size", 1) if "kivi" in scheme else 1
    older = [(128 - spared) // group * group, 128 - spared]  # keys, values
    stored = sum(n * BITS[scheme] + (128 - n) * 16 for n in older) / 256
    assert audit.bits_per_value == pytest.approx(stored)
    assert audit.bytes_per_token == pytest.approx(stored * 2 * 2 * 2 * 16 / 8)


def broken_audit(monkeypatch, method, replacement, scheme="token"):
    model = model_of("llama", "softmax", scheme)
    quantizer = quantizer_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    monkeypatch.setattr(rounding, method, replacement)
    return measure_kv(model, quantizer, ids(2, 40))[1]


def test_the_audit_finds_too_many_levels(monkeypatch):
    right = rounding.by_token
    finer = rounding.Format(bits=4, floating=False, symmetric=True, scale_dtype=torch.float32)
    problems = broken_audit(
        monkeypatch, "by_token", lambda x, form, group: right(x, finer, group),
        "token, first and recent",
    )  # fmt: skip
    assert "levels share a scale, 3 bits have 8" in problems[0]


def test_the_audit_finds_a_cache_that_is_none(monkeypatch):
    problems = broken_audit(monkeypatch, "by_token", lambda x, form, group: x)
    assert any("nothing was quantized" in line for line in problems)


def test_the_audit_finds_clipping(monkeypatch):
    right = rounding.by_token
    problems = broken_audit(
        monkeypatch, "by_token", lambda x, form, group: right(x.clamp(-0.5, 0.5), form, group)
    )
    assert any("half a step" in line for line in problems)


def test_the_audit_finds_first_tokens_that_were_quantized(monkeypatch):
    problems = broken_audit(monkeypatch, "channel_groups", _from_zero, "kivi before RoPE")
    assert any("keys of the first 1 tokens are changed" in line for line in problems)


_right_groups = rounding.channel_groups


def _from_zero(positions, first, group):
    return _right_groups(positions, 0, group)


def test_the_audit_finds_an_attention_without_a_cache():
    model = model_of("llama", "softmax", "token")
    quantizer = quantizer_of({"kv": SCHEMES["token"]}, compute_dtype="float32")
    delattr(model.model.layers[1].self_attn, ATTRIBUTE)
    problems = measure_kv(model, quantizer, ids(2, 40))[1]
    assert problems == ["model.layers.1.self_attn: its KV cache is not quantized"]
    unquantized = quantizer_of({"name": "fp32"}, compute_dtype="float32")
    assert measure_kv(model_of(), unquantized, ids(2, 40)) == (None, [])


def test_nan_stays_nan():
    form = rounding.Format(bits=4, floating=False, symmetric=True, scale_dtype=torch.float16)
    x = torch.ones(3, 16)
    x[1, 2] = math.nan
    x[2, 3] = math.inf
    assert rounding.by_token(x, form, 16).isnan().any(-1).tolist() == [False, True, True]


def test_a_cell_whose_cache_is_no_cache_fails(monkeypatch):
    model = model_of("llama", "softmax", "token")
    quantizer = quantizer_of({"kv": SCHEMES["token"]}, compute_dtype="float32")
    passed = audit(model_of(), model, quantizer, ids(2, 40))
    assert passed.problems == ()
    assert 8 < passed.kv_cache.levels <= 15
    monkeypatch.setattr(rounding, "by_token", lambda x, form, group: x)
    failed = audit(model_of(), model, quantizer, ids(2, 40))
    assert not failed.passed
    assert any("nothing was quantized" in line for line in failed.problems)
