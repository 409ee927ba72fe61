"""bitsandbytes 4-bit on processors of both kinds: every width runs with what its codes say.

The library's own kernels choose their path inside compiled code, by the processor; what Python
decides, its repacking, is tried both ways here.
"""

import copy

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from quantizer_models import PROBE, check, llama, make, packed_layer, settings
from torch import nn

from qbench.quantizers import bnb
from qbench.quantizers.methods.weight_only import BNB_BLOCK as BLOCK


@pytest.mark.parametrize(
    ("hidden", "intermediate", "dtype", "avx512"),
    [(48, 160, "float32", False), (48, 160, "bfloat16", True), (64, 128, "bfloat16", False),
     (64, 128, "float32", True)],
)  # fmt: skip
def test_models_of_every_width_pass_their_audit(
    hidden, intermediate, dtype, avx512, tmp_path, monkeypatch
):
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: avx512)
    chosen = settings("bnb-4bit", compute_dtype=dtype)
    shape = {"hidden": hidden, "intermediate": intermediate, "dtype": getattr(torch, dtype)}
    model = make(chosen, tmp_path, model=llama(**shape))
    report = check(model, chosen, llama(**shape))
    assert report.problems == ()
    assert report.weight_error < 0.11


def rows_begin_blocks(self, x):
    """What the library's kernel computes on processors with AVX512-BF16: each row's scales are
    taken from where a row of whole blocks would have them."""
    state, (height, width) = self.weight.quant_state, self.weight.quant_state.shape
    packed = self.weight.data.reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(height, width).long()
    row, column = torch.arange(height)[:, None], torch.arange(width)[None]
    block = (row * -(-width // BLOCK) + column // BLOCK).clamp(max=len(state.absmax) - 1)
    return nn.functional.linear(x, (state.code[codes] * state.absmax[block]).to(x.dtype))


def test_a_forward_with_scales_of_other_blocks_is_caught_on_every_processor(tmp_path, monkeypatch):
    """Relative error 0.2 to 0.3 instead of 0.09: within any bound on errors alone."""
    chosen, shape = settings("bnb-4bit"), {"hidden": 32, "intermediate": 48}
    model = make(chosen, tmp_path, model=llama(**shape))
    monkeypatch.setattr(bnb.Linear4, "forward", rows_begin_blocks)
    report = check(model, chosen, llama(**shape))
    assert not report.passed
    assert report.weight_error < chosen.weights.error_bound
    assert any("off the stored ones" in problem for problem in report.problems)


def test_the_avx512_repacking_is_never_asked_for(monkeypatch, tmp_path):
    """Where the processor has AVX512-BF16, a layer that asks would repack at its first forward."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    assert bitsandbytes.nn.Linear4bit(64, 64).support_avx512bf16_for_cpu
    model = make(settings("bnb-4bit", double_quant=True), tmp_path)
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 14
    before = [functional.dequantize_4bit(m.weight.data, m.weight.quant_state) for m in layers]
    model(input_ids=PROBE)
    after = [functional.dequantize_4bit(m.weight.data, m.weight.quant_state) for m in layers]
    assert not any(m.support_avx512bf16_for_cpu for m in layers)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert check(model, settings("bnb-4bit", double_quant=True)).passed


# LLM.int8's layers, which share the codes of an input, give what the library's own give.


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


def int8_layer(dtype=torch.float32, *, threshold=6.0, bias=False, height=40, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, height, bias=bias, dtype=dtype).requires_grad_(False)
    return packed_layer(settings("bnb-8bit", threshold=threshold), layer)


def inputs(*shape, dtype=torch.float32, outliers=True):
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0)).clamp(-5, 5)
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
@pytest.mark.parametrize(
    ("outliers", "threshold"), [(False, 6.0), (True, 0.0), (True, 1.0), (True, 6.0)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_layers_that_share_an_input_are_the_librarys_to_the_bit(dtype, outliers, threshold, bias):
    made = {"threshold": threshold, "bias": bias is not None, "dtype": bias or dtype}
    ours = [int8_layer(**made, height=40 + 8 * seed, seed=seed) for seed in range(3)]
    theirs = [Librarys(layer) for layer in ours]
    for shape in ((1,), (5,), (1, 1), (2, 5), (2, 3, 4), (0,), (2, 0)):
        x = inputs(*shape, dtype=dtype, outliers=outliers and 0 not in shape)
        for _ in range(2):
            for our, their in zip(ours, theirs, strict=True):
                y, expected = our(x), their(x.clone())
                assert (y.dtype, y.shape) == (expected.dtype, (*shape, our.out_features))
                assert torch.equal(y, expected)
            x.mul_(-1.5)[..., 5] = 7.0  # to be seen, the second time


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_codes_are_made_once_for_a_tensor_as_it_is(dtype, quantized):
    first, second, other = int8_layer(), int8_layer(), int8_layer(threshold=1.0)
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
    layer = int8_layer()
    theirs = Librarys(layer)
    with torch.inference_mode():
        x = inputs(2, 5)
        for _ in range(3):
            assert torch.equal(layer(x), theirs(x.clone()))
            x.mul_(-1.5)
    with torch.no_grad():
        assert torch.equal(layer(x), theirs(x.clone()))
