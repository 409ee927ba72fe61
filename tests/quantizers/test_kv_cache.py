"""A KV cache of few bits in whole models: scoring, generating, refusing."""

import pytest
import torch
from quantizer_models import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention import transformers as transformers_attention
from qbench.attention.quantized_kv import KV_CACHE
from qbench.attention.transformers import Mask, attention_name, set_attention
from qbench.errors import RecipeError, UnavailableError
from qbench.quantizers import fake_quant as rounding
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.audit.kv_cache import measure_kv
from qbench.quantizers.fake_quant import KVFakeQuant
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of, settings_of

SHAPE = SIZES | {"head_dim": 16, "initializer_range": 0.2, "bos_token_id": None,
                 "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),  # norms its keys before RoPE
    "mistral": MistralConfig(**SHAPE, sliding_window=9),
}
SCHEMES = {
    "token": {"name": "int4-token"},
    "token, first": {"name": "int3-token", "sink_tokens": 2},
    "fp8": {"name": "fp8-token", "sink_tokens": 1},
    "token in groups": {"name": "int4-token", "group_size": 8},
}  # fmt: skip


def model_of(kind="llama", normalizer="softmax", scheme=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[kind]).eval().requires_grad_(False)
    set_attention(model, normalizer=normalizer, implementation="reference")
    if scheme is None:
        return model
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype="float32")
    return apply(model, quantizer, {})


def ids(*shape, seed=0):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(actual, expected):
    # rounding differs with shapes, and may take a value over the border between two codes
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02)


CASES = [
    *((scheme, "llama", "softpick") for scheme in SCHEMES),
    ("token in groups", "qwen3", "softmax"),
    ("token, first", "mistral", "softmax"),
]


@pytest.mark.parametrize(("scheme", "kind", "normalizer"), CASES)
def test_generation_attends_to_what_scoring_attends_to(scheme, kind, normalizer):
    model = model_of(kind, normalizer, scheme)
    long, short = ids(1, 17), ids(1, 11, seed=1)
    prompt = torch.zeros(2, 17, dtype=torch.long)
    prompt[0], prompt[1, 6:] = long, short
    for starts in ((0, 6), (0,)):  # the longer one also without padding
        given = prompt[: len(starts)]
        made = model.generate(
            given, attention_mask=(given > 0).long(), max_new_tokens=20, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        steps = torch.stack(made.logits, dim=1)
        for row, start in enumerate(starts):
            text = made.sequences[row : row + 1, start:]
            scored = model(text, use_cache=False).logits[:, -21:-1]
            assert_equal(steps[row : row + 1], scored)
    plain = model_of(kind, normalizer)(text, use_cache=False).logits[:, -21:-1]
    assert (plain - scored).abs().max() > 0.1


def test_masks_that_do_not_say_where_sequences_begin_are_refused():
    parts = torch.randn(3, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    dense, padding = torch.ones(1, 1, 9, 9).bool().tril(), torch.ones(1, 9, dtype=torch.long)

    def attend(mask, **options):
        module = torch.nn.Module()
        module.is_causal = True
        setattr(module, KV_CACHE, KVFakeQuant(settings_of("kv-int3-token", options)))
        function = ALL_ATTENTION_FUNCTIONS[attention_name("softmax", "reference", "cpu")]
        return function(module, *parts, mask)[0]

    torch.testing.assert_close(attend(dense), attend(None))
    with pytest.raises(UnavailableError, match="a 4-D mask does not show"):
        attend(dense, sink_tokens=2)
    padding[0, 4] = 0
    with pytest.raises(UnavailableError, match="has holes"):
        attend(Mask(lambda: dense, padding=padding), sink_tokens=2)


REFUSED = {
    "latent": ("int4-token", {}),
    "group_size 5 does not divide": ("int4-token", {"group_size": 5}),
    "sink_tokens 128 leave no token of this checkpoint's context of 128": (
        "int4-token", {"sink_tokens": 128},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_checkpoint_cannot_have_is_refused_before_it_is_loaded(message):
    name, options = REFUSED[message]
    latent = {"kv_lora_rank": 512} if message == "latent" else {}
    with pytest.raises(RecipeError, match=message) as refused:
        settings_of(f"kv-{name}", options).check(LlamaConfig(**SHAPE).to_dict() | latent, "cpu")
    assert "\n" not in str(refused.value)


# What the audit measures of a KV cache, and the faults that it finds.


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
    report = audit(model_of(), model, quantizer, ids(2, 40))
    assert not report.passed
    assert any(words in line for line in report.problems)


def test_the_audit_finds_other_bits_than_the_settings_say_and_an_attention_without_a_cache():
    model = model_of("llama", "softmax", "token, first")
    quantizer = config_of({"kv": "int8-token"}, compute_dtype="float32")
    delattr(model.model.layers[1].self_attn, KV_CACHE)
    assert measure_kv(model, quantizer, ids(2, 40))[1] == [
        "model.layers.1.self_attn: its KV cache is not quantized",
        "model.layers.0.self_attn: its KV cache has 3 bits, the settings say 8",
    ]


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
    read = transformers_attention.read
    monkeypatch.setattr(transformers_attention, "read", lambda cache, module, *kv, **options:
                        (read(cache, module, *kv, **options), kv)[1])  # fmt: skip
    problems = measure_kv(model, quantizer, ids(2, 40))[1]
    assert any("attention's output differs by" in line for line in problems)
