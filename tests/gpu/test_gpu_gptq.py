"""GPTQ on a GPU: its kernel of columns gives the bits of the loop, Hessians are of float32."""

import pytest
import torch
from quantizer_models import settings
from test_gptq import BLOCKS, block_of, hessian, problem, solve

from qbench.quantizers import gptq
from qbench.quantizers.calibration import _product


@pytest.mark.parametrize("case", [*BLOCKS, (1024, 128, 4, 1, ""), (2817, 128, 3, 8, "")])
def test_the_kernel_of_columns_is_the_loop_to_the_bit(case):
    expected, actual = (gptq._block(*block_of(case, device)) for device in ("cpu", "cuda"))
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one.nan_to_num(7e9), other.cpu().nan_to_num(7e9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(0, 96), (1, 96), (5000, 96), (300, 4100)])
def test_products_of_16_bits_are_summed_in_float32(dtype, tokens, width):
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(dtype).cuda()
    actual, expected = _product(x), x.double().T @ x.double()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("stated", [{}, {"desc_act": True}, {"group_size": -1}], ids=str)
def test_codes_of_a_gpu_are_as_good_as_those_of_a_cpu(stated):
    weight, x = problem(48, 2304)
    chosen, moments = settings("gptq-3bit", **stated), hessian(x)
    lost = []
    for device in ("cpu", "cuda"):
        actual = solve(weight.to(device), moments.to(device), chosen).weight.cpu()
        off = (actual - weight).double()
        lost.append(float(((off @ moments.double()) * off).sum()))
    assert lost[1] == pytest.approx(lost[0], rel=0.01)
