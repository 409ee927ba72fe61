"""Attention reads a quantized KV cache: rounded keys and values, by each token's own position."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention import reference
from qbench.attention.masks import Mask
from qbench.attention.quantized_kv import KV_CACHE
from qbench.attention.transformers import attention_name
from qbench.errors import UnavailableError
from qbench.quantizers.fake_quant import KVFakeQuant
from qbench.quantizers.registry import settings_of

T, HEADS, KV_HEADS, WIDTH = 23, 4, 2, 16
INT8 = KVFakeQuant(settings_of("kv-int8-token"))
FIRST = KVFakeQuant(settings_of("kv-int3-token", {"sink_tokens": 2}))
CACHES = pytest.mark.parametrize("cache", [INT8, FIRST], ids=["int8", "first"])


def draw(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, T, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    key[:, :, 0] *= 6  # as a sink's
    return query * 2, key, value


def attend(cache, query, key, value, mask=None, normalizer="softmax"):
    module = torch.nn.Module()
    module.is_causal = True
    setattr(module, KV_CACHE, cache)
    function = ALL_ATTENTION_FUNCTIONS[attention_name(normalizer, "reference", "cpu")]
    return function(module, query, key, value, mask)[0].transpose(1, 2)


def expected(cache, query, key, value, normalizer="softmax", **settings):
    """Attention over keys and values that are rounded beforehand, the first tokens left alone."""
    sinks = (torch.arange(T) < cache.sink_tokens)[:, None]
    far = torch.full((1, T), T)
    rounded = (torch.where(sinks, x, cache.rounded(x, far)) for x in (key, value))
    settings |= {"normalizer": normalizer, "causal": True}
    return reference.attention(query, *rounded, **settings)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
@CACHES
def test_every_query_reads_rounded_keys_and_values(cache, normalizer):
    parts = draw()
    wanted = expected(cache, *parts, normalizer)
    torch.testing.assert_close(attend(cache, *parts, normalizer=normalizer), wanted)
    plain = reference.attention(*parts, normalizer=normalizer, causal=True)
    assert (plain - wanted).abs().max() > 1e-3


@CACHES
def test_a_cache_that_dropped_what_left_the_window_counts_on(cache):
    query, key, value = draw(seed=2)
    wanted = expected(cache, query, key, value, window=6)
    for t in (5, 6, 15, 22):
        seen = slice(t - 5, t + 1)
        mask = Mask(lambda: torch.ones(1, 1, 1, 6, dtype=torch.bool), kv_offset=t - 5)
        found = attend(cache, query[:, :, t : t + 1], key[:, :, seen], value[:, :, seen], mask)
        torch.testing.assert_close(found, wanted[:, :, t : t + 1])


def test_masks_that_do_not_say_where_sequences_begin_are_refused():
    parts = draw()
    dense = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(INT8, *parts, dense), attend(INT8, *parts))
    with pytest.raises(UnavailableError, match="a 4-D mask does not show"):
        attend(FIRST, *parts, dense)
    holes = torch.ones(1, T, dtype=torch.long)
    holes[0, 4] = 0
    with pytest.raises(UnavailableError, match="has holes"):
        attend(FIRST, *parts, Mask(lambda: dense, padding=holes))
