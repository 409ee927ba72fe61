"""Attention over a quantized KV cache against a cache that is written token by token."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from written_cache import decode

from qbench.attention.masks import Mask
from qbench.attention.quantized_kv import KV_CACHE
from qbench.attention.transformers import attention_name
from qbench.errors import UnavailableError
from qbench.quantizers.fake_quant import KVFakeQuant
from qbench.quantizers.registry import settings_of

T, HEADS, KV_HEADS, WIDTH = 23, 4, 2, 16
FEW = ("int8", "first")

# Name and options of the recipe, and the same said to the cache that is written.
SCHEMES = {
    "int8": ("int8-token", {}, {"bits": 8}),
    "int4": ("int4-token", {}, {"bits": 4}),
    "int3 in groups of channels": ("int3-token", {"group_size": 4}, {"bits": 3, "channels": 4}),
    "fp8": ("fp8-token", {}, {"bits": 0}),
    "first": ("int3-token", {"sink_tokens": 2}, {"bits": 3, "sink_tokens": 2}),
}  # fmt: skip


def carrier(scheme: str) -> torch.nn.Module:
    name, options, _ = SCHEMES[scheme]
    module = torch.nn.Module()
    module.is_causal = True
    setattr(module, KV_CACHE, KVFakeQuant(settings_of(f"kv-{name}", options)))
    return module


def draw(tokens: int = T, batch: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    key[:, :, 0] *= 6  # as a sink's
    key[..., 3] += 4  # a channel that is large for all tokens
    return query * 2, key, value


def attend(scheme, query, key, value, mask=None, normalizer="softmax", **options):
    function = ALL_ATTENTION_FUNCTIONS[attention_name(normalizer, "reference", "cpu")]
    output, _ = function(carrier(scheme), query, key, value, mask, **options)
    return output.transpose(1, 2)


def written(scheme, query, key, value, normalizer="softmax", window=None):
    parts = (tensor[0].numpy() for tensor in (query, key, value))
    found = decode(*parts, normalizer, window, **SCHEMES[scheme][2])
    return torch.from_numpy(found).float()[None]


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scoring_attends_to_what_decoding_attends_to(scheme, normalizer):
    parts = draw()
    assert_equal(attend(scheme, *parts, normalizer=normalizer), written(scheme, *parts, normalizer))


@pytest.mark.parametrize("scheme", FEW)
def test_a_sliding_window_reads_the_same_cache(scheme):
    parts = draw(seed=2)
    index = torch.arange(T)
    dense = (index[:, None] >= index) & (index > index[:, None] - 6)
    found = attend(scheme, *parts, Mask(lambda: dense[None, None], window=6))
    assert_equal(found, written(scheme, *parts, window=6))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_that_dropped_what_left_the_window_counts_on(scheme):
    query, key, value = draw(seed=2)
    expected = written(scheme, query, key, value, window=6)
    for t in (8, 15, 22):
        seen = slice(t - 5, t + 1)
        mask = Mask(lambda: torch.ones(1, 1, 1, 6, dtype=torch.bool), kv_offset=t - 5)
        found = attend(scheme, query[:, :, t : t + 1], key[:, :, seen], value[:, :, seen], mask)
        assert_equal(found, expected[:, :, t : t + 1])


def test_masks_that_do_not_say_where_sequences_begin_are_refused():
    parts = draw()
    dense = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    assert_equal(attend("int8", *parts, dense), attend("int8", *parts))
    with pytest.raises(UnavailableError, match="a 4-D mask does not show"):
        attend("first", *parts, dense)
    holes = torch.ones(1, T, dtype=torch.long)
    holes[0, 4] = 0
    with pytest.raises(UnavailableError, match="has holes"):
        attend("first", *parts, Mask(lambda: dense, padding=holes))
