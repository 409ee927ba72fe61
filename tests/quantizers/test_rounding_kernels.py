"""The Triton kernels of rounding and of GPTQ's columns, in the interpreter, are their definitions
in PyTorch. In float32 and float16 alone, since the interpreter cuts bfloat16 off."""

import importlib.util
import os

import pytest
import torch
from test_fake_quant import FORMATS, INF, KV_FORMATS, NAN, draw, equal, of_tensor, ties
from test_gptq import BLOCKS, block_of

from qbench.quantizers import fake_quant, gptq
from qbench.quantizers.fake_quant import KVFakeQuant
from qbench.quantizers.registry import settings_of

if os.environ["TRITON_INTERPRET"] != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("kernels run on a GPU here, or there is no Triton", allow_module_level=True)

from qbench.quantizers import fake_quant_kernels as kernels
from qbench.quantizers import gptq_columns

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, on odd values


def odd(columns):
    x = draw(7, columns)
    x[1], x[2, 1], x[3, 2] = 0.0, NAN, INF
    x[4] *= 1e-30
    return x


@pytest.mark.parametrize("form", [*FORMATS.values(), *KV_FORMATS.values()], ids=str)
@pytest.mark.parametrize("scales", ["own", "fixed"])
def test_values_are_rounded_alike(form, scales):
    chosen, fixed = form, None
    if scales == "fixed":
        chosen, fixed = of_tensor(form), fake_quant.scale_of_tensor(*torch.tensor([-7.0, 3]), form)
    for x in (odd(100), ties(4, 32).view(-1, 16), ties(4, 32).view(-1, 16).half()):
        if chosen is not None:
            expected = fake_quant.fake_quantize_definition(x, chosen, fixed)
            assert equal(kernels.fake_quantize_rows(x, chosen, fixed), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [("int4-token", {"sink_tokens": 2}), ("int2-token", {"group_size": 8}), ("fp8-token", {})],
)
def test_caches_are_rounded_alike(name, options, monkeypatch):
    """[B, H, T, D] laid out as [B, T, H, D], as transformers has it."""
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(2, 11, 3, 24, generator=generator).transpose(1, 2)
    keys = keys * torch.logspace(-3, 2, 24)
    keys[0, 1, 2], keys[1, 0, 4, 3] = 0, NAN
    positions = torch.stack([torch.arange(11), torch.arange(-3, 8)]).int()
    cache = KVFakeQuant(settings_of(f"kv-{name}", options))
    expected = cache.rounded(keys, positions)
    monkeypatch.setattr(fake_quant, "fake_quantize_rows", kernels.fake_quantize_rows)
    assert equal(cache.rounded(keys, positions), expected)


def test_columns_of_gptq_may_lie_where_a_row_has_more_than_32_bits():
    try:
        memory = torch.empty(2**32 + 64)  # of which few places are touched
    except RuntimeError:
        pytest.skip("the machine does not give 17 GB of address space")
    work, *rest = block_of((3, 16, 4, 1, ""))
    far = memory.as_strided(work.shape, (2**30, 1), 2**31)
    far.copy_(work)
    memory[:16] = 0
    expected, actual = gptq_columns.block(work, *rest), gptq_columns.block(far, *rest)
    assert all(equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_columns_of_gptq_are_alike(case):
    work, *rest = block_of(case)
    expected, actual = gptq._block(work, *rest), gptq_columns.block(work, *rest)
    assert all(equal(a, b) for a, b in zip(actual, expected, strict=True))
