"""LLM.int8's layers, which share the codes of an input, give what the library's own give."""

import copy

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from quantizer_models import llama, logits, make, packed_layer, settings
from torch import nn

from qbench.quantizers import bnb

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 48


class Librarys(nn.Module):
    """A layer as the library runs it, which knows up to three dimensions."""

    def __init__(self, layer):
        super().__init__()
        self.layer = copy.deepcopy(layer)

    def forward(self, x):
        given = x if x.dim() <= 3 else x.flatten(0, -2)
        y = bitsandbytes.nn.Linear8bitLt.forward(self.layer, given)
        return y.reshape(*x.shape[:-1], self.layer.out_features)


def layer_of(dtype=torch.float32, *, threshold=6.0, bias=False, height=40, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, height, bias=bias, dtype=dtype).requires_grad_(False)
    return packed_layer(settings("bnb-8bit", threshold=threshold), layer)


def inputs(*shape, dtype=torch.float32, outliers=True, seed=0):
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5)
    if outliers:
        x[..., 3], x[0, ..., 17] = 8.0, -6.0  # the threshold itself counts
    return x.to(dtype)


@pytest.fixture
def quantized(monkeypatch):
    """What was quantized, with the threshold, one entry a call."""
    calls, theirs = [], functional.int8_vectorwise_quant
    monkeypatch.setattr(
        functional,
        "int8_vectorwise_quant",
        lambda x, threshold=0.0: calls.append((x, threshold)) or theirs(x, threshold=threshold),
    )
    return calls


@pytest.mark.parametrize("bias", [None, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_layers_that_share_an_input_are_the_librarys_to_the_bit(dtype, outliers, threshold, bias):
    made = {"threshold": threshold, "bias": bias is not None, "dtype": bias or dtype}
    ours = [layer_of(**made, height=40 + 8 * seed, seed=seed) for seed in range(3)]
    theirs = [Librarys(layer) for layer in ours]
    for shape in ((1,), (5,), (1, 1), (2, 5), (2, 3, 4), (0,), (2, 0)):
        x = inputs(*shape, dtype=dtype, outliers=outliers and 0 not in shape)
        for _ in range(2):
            for our, their in zip(ours, theirs, strict=True):
                y, expected = our(x), their(x.clone())
                assert (y.dtype, y.shape) == (expected.dtype, (*shape, our.out_features))
                assert torch.equal(y, expected)
            x.mul_(-1.5)[..., 5] = 7.0  # to be seen, the second time


@pytest.mark.parametrize("threshold", [0.0, 0.5, 6.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_the_librarys_and_a_block_quantizes_four_inputs(
    dtype, threshold, tmp_path, monkeypatch, quantized
):
    chosen = settings("bnb-8bit", compute_dtype=dtype, threshold=threshold)
    model = make(chosen, tmp_path, model=llama(dtype=getattr(torch, dtype)))
    quantized.clear()
    ours = logits(model)
    assert [given for _, given in quantized] == [threshold] * 2 * 4  # of two blocks
    monkeypatch.setattr(bnb.Linear8, "forward", bitsandbytes.nn.Linear8bitLt.forward)
    assert torch.equal(ours, logits(model))
    assert len(quantized) == 2 * (4 + 7)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_codes_are_made_once_for_a_tensor_as_it_is(dtype, quantized):
    first, second, other = layer_of(), layer_of(), layer_of(threshold=1.0)
    x = inputs(2, 5, dtype=dtype)
    quantized.clear()
    for count, step in enumerate(
        (
            lambda: (first(x), second(x)),
            lambda: (x[0].mul_(2), first(x), second(x)),  # by a view
            lambda: (other(x), other(x)),
            lambda: (first(x.clone()), second(x)),
        ),
        start=1,
    ):
        step()
        assert len(quantized) == count + (count == 4)


def test_a_tensor_that_counts_no_versions_is_always_quantized():
    layer = layer_of()
    theirs = Librarys(layer)
    with torch.inference_mode():
        x = inputs(2, 5)
        for _ in range(3):
            assert torch.equal(layer(x), theirs(x.clone()))
            x.mul_(-1.5)
    with torch.no_grad():
        assert torch.equal(layer(x), theirs(x.clone()))
