import math

import pytest
import torch
from normalizer_parameters import parameters

from qbench.attention import reference
from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.normalizers.softpick import EPSILON
from qbench.errors import RecipeError

SHAPES = (  # batch, query heads, key heads, queries, keys, width, value width
    (1, 1, 1, 1, 1, 16, 16),
    (2, 3, 3, 17, 17, 8, 8),
    (1, 4, 2, 5, 33, 20, 12),
    (2, 6, 1, 63, 63, 16, 16),
)


def given(function):
    """With the parameters that the normalizer needs, where no others are given."""

    def run(query, *inputs, normalizer, **settings):
        if "parameters" not in settings and normalizer in NORMALIZERS:
            settings["parameters"] = parameters(normalizer, query.shape[1], dtype=query.dtype)
        return function(query, *inputs, normalizer=normalizer, **settings)

    return run


attention, packed_attention, weights = map(
    given, (reference.attention, reference.packed_attention, reference.weights)
)


def draw(shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, queries, keys, width, v_width = shape
    sizes = ((heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, v_width))
    return [
        torch.randn(batch, *s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes
    ]


def by_hand(query, key, value, normalizer, allowed):
    """The paper's formulas row by row, as they are printed."""
    batch, heads, queries, width = query.shape
    group = heads // key.shape[1]
    given = parameters(normalizer, heads)
    output = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = allowed[i].nonzero().flatten()
                if not len(seen):
                    continue
                x = (key[b, h // group, seen] @ query[b, h, i]) / math.sqrt(width)
                if "s" in given:  # equation (8)
                    one_more = normalizer.endswith("-next")  # as upstream's code counts
                    x = x * given["s"][h] * math.log(len(seen) + one_more)
                m = max(0.0, x.max().item())
                if "softpick" in normalizer:  # equation (1)
                    e = torch.exp(x - m) - math.exp(-m)
                    w = e.relu() / (e.abs().sum() + EPSILON)
                elif normalizer == "rectified":  # appendix B
                    e = torch.exp(torch.where(x >= 0, x, -torch.inf) - m)
                    w = e / e.sum() if e.sum() > 0 else e
                elif normalizer == "sigmoid":  # equation (2) of its paper
                    w = 1 / (1 + torch.exp(-x) * len(seen))
                elif normalizer == "softmax1":
                    w = torch.exp(x) / (1 + torch.exp(x).sum())
                elif normalizer == "softmax-sink":
                    w = torch.exp(x) / (torch.exp(given["sinks"][h]) + torch.exp(x).sum())
                else:
                    w = torch.softmax(x, 0)
                output[b, h, i] = w @ value[b, h // group, seen]
    return output


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_is_the_papers_formula(shape, normalizer, causal, window, dtype):
    query, key, value = draw(shape, dtype)
    queries, keys = shape[3:5]
    own = torch.arange(queries)[:, None] + keys - queries
    other = torch.arange(keys)[None]
    allowed = (other <= own) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if window:
        allowed = allowed & (other > own - window)
    expected = by_hand(query.double(), key.double(), value.double(), normalizer, allowed)
    got = attention(query, key, value, normalizer=normalizer, causal=causal, window=window)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_gradients_agree_with_finite_differences(normalizer):
    inputs = [tensor.requires_grad_() for tensor in draw((1, 2, 1, 4, 6, 5, 3), seed=3)]
    names = parameters(normalizer, 2, slopes=True)
    if normalizer == "sigmoid":
        names["bias"] = torch.tensor([-2.0, 0.5], dtype=torch.float64)
    learned = [parameter.requires_grad_() for parameter in names.values()]

    def run(query, key, value, *learned):
        return attention(
            query, key, value, normalizer=normalizer, causal=True, softcap=1.5,
            parameters=dict(zip(names, learned, strict=True)),
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (*inputs, *learned))


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize("window", [None, 4])
def test_scores_are_capped_then_sloped_then_normalized(normalizer, window):
    query, key, value = draw((2, 4, 2, 9, 13, 8, 5))
    names = parameters(normalizer, 4, slopes=True)
    got = attention(
        query, key, value, normalizer=normalizer, parameters=names, causal=True, window=window,
        softcap=0.7,
    )  # fmt: skip
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(8)
    distances = torch.arange(9)[:, None] + 4 - torch.arange(13)
    scores = 0.7 * torch.tanh(scores / 0.7) - names.pop("slopes")[:, None, None] * distances
    allowed = (distances >= 0) & (distances < (window or 99))
    w = NORMALIZERS.get(normalizer).weights(scores, allowed=allowed, parameters=names)
    torch.testing.assert_close(got, w @ value.repeat_interleave(2, 1))


def test_a_bias_replaces_the_one_by_length():
    query, key, _ = draw((1, 2, 2, 5, 5, 8, 8))
    bias = torch.tensor([-3.0, 1.0], dtype=torch.float64)
    got = weights(query, key, normalizer="sigmoid", parameters={"bias": bias}, causal=True)
    scores = query @ key.transpose(2, 3) / math.sqrt(8)
    torch.testing.assert_close(got, torch.sigmoid(scores + bias[:, None, None]).tril())
    by_length = weights(query, key, normalizer="sigmoid", causal=True)
    n = torch.arange(1, 6)[:, None]
    torch.testing.assert_close(by_length, torch.sigmoid(scores - n.log()).tril())


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_query_with_nothing_to_attend_to_gives_zero(normalizer, dtype):
    query, key, value = draw((1, 2, 2, 3, 4, 8, 8), dtype)
    mask = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    mask[..., 1, :] = False
    output = attention(query, key, value, normalizer=normalizer, mask=mask)
    assert (output[:, :, 1] == 0).all()
    assert (output[:, :, 0] != 0).any()


@pytest.mark.parametrize("normalizer", ["softpick", "rectified"])
def test_a_row_with_no_positive_score_gives_zero(normalizer):
    key = torch.rand(1, 1, 5, 8) + 0.1
    output = attention(-key, key, torch.randn(1, 1, 5, 8), normalizer=normalizer)
    assert (output == 0).all()


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_masked_keys_count_neither_above_nor_below_the_line(normalizer):
    query, key, value = draw((2, 4, 2, 3, 9, 8, 8), torch.float32)
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    mask[..., 5:] = False
    poisoned = key.clone()
    poisoned[:, :, 5:] = 30.0
    got = attention(query, poisoned, value, normalizer=normalizer, mask=mask)
    expected = attention(query, key[:, :, :5], value[:, :, :5], normalizer=normalizer)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize("scale", [0.3, 40.0])
def test_inference_and_autograd_compute_the_same(normalizer, scale):
    query, key, value = draw((2, 2, 2, 40, 40, 16, 16), torch.float32)
    settings = {"normalizer": normalizer, "causal": True, "scale": scale}
    plain = attention(query, key, value, **settings)
    tracked = attention(query.clone().requires_grad_(), key, value, **settings)
    torch.testing.assert_close(plain, tracked.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_chunks_change_nothing(normalizer, monkeypatch):
    query, key, value = draw((1, 2, 1, 70, 90, 8, 8))
    settings = {"normalizer": normalizer, "causal": True, "window": 20}
    whole = attention(query, key, value, **settings)
    monkeypatch.setattr("qbench.attention.reference.CHUNK_SCORES", 64)
    torch.testing.assert_close(attention(query, key, value, **settings), whole)


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_weights_times_values_are_the_attention(normalizer):
    query, key, value = draw((2, 4, 4, 33, 33, 8, 8))
    w = weights(query, key, normalizer=normalizer, causal=True)
    assert w.shape == (2, 4, 33, 33)
    assert (w.triu(1) == 0).all()
    torch.testing.assert_close(
        w @ value, attention(query, key, value, normalizer=normalizer, causal=True)
    )


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_packed_sequences_do_not_see_each_other(normalizer):
    query, key, value = draw((1, 4, 2, 30, 30, 8, 8))
    cu_seqlens = torch.tensor([0, 7, 7, 18, 30], dtype=torch.int32)
    got = packed_attention(
        query, key, value, normalizer=normalizer, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens
    )
    for start, stop in ((0, 7), (7, 18), (18, 30)):
        alone = (tensor[:, :, start:stop] for tensor in (query, key, value))
        expected = attention(*alone, normalizer=normalizer, causal=True)
        torch.testing.assert_close(got[:, :, start:stop], expected)


def test_an_unknown_normalizer_lists_the_known_ones():
    with pytest.raises(RecipeError, match="softmax, softpick, rectified"):
        attention(*draw(SHAPES[1]), normalizer="softmix")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(1, 1, 17, 17), "must be bool"),
        (torch.ones(1, 1, 17, 16, dtype=torch.bool), "does not fit"),
        (torch.ones(17, 17, dtype=torch.bool), "does not fit"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        attention(*draw(SHAPES[1]), normalizer="softpick", mask=mask)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick", "rectified"])
@pytest.mark.parametrize("length", [427, 100])
def test_the_layout_of_the_inputs_changes_no_bit(normalizer, length):
    """With a cache keys come contiguous, without one as views; scores must not depend on it."""
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(8, length, 6, 64, generator=generator).transpose(1, 2) for _ in range(3)]
    expected = attention(*views, normalizer=normalizer, causal=True)
    dense = [view.contiguous() for view in views]
    for inputs in (dense, (views[0], *dense[1:])):
        assert torch.equal(attention(*inputs, normalizer=normalizer, causal=True), expected)
