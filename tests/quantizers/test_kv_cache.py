"""A KV cache of few bits in whole models: scoring, generating, refusing."""

import pytest
import torch
from kv_cache_models import SCHEMES, SHAPE, ids, model_of
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.masks import Mask
from qbench.attention.quantized_kv import KV_CACHE
from qbench.attention.transformers import attention_name
from qbench.errors import RecipeError, UnavailableError
from qbench.quantizers.fake_quant import KVFakeQuant
from qbench.quantizers.registry import config_of, settings_of


def assert_equal(found, expected):
    # rounding differs with shapes, and may take a value over the border between two codes
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_texts_score_as_they_do_alone(scheme):
    model = model_of("llama", "softpick", scheme)
    first, second = ids(1, 13), ids(1, 22, seed=3)
    positions = torch.cat([torch.arange(13), torch.arange(22)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    assert_equal(packed[:, :13], model(first, use_cache=False).logits)
    assert_equal(packed[:, 13:], model(second, use_cache=False).logits)


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


def test_scales_of_a_tensor_are_declared():
    quantizer = config_of({"kv": "int4-tensor"}, compute_dtype="float32")
    assert not quantizer.batch_invariant
    assert config_of({"kv": "int4-token"}, compute_dtype="float32").batch_invariant


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
