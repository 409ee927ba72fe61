"""Activations on CUDA: the kernel equals the definitions, and what simulating costs."""

from dataclasses import replace

import pytest
import torch
from quantizer_models import PROBE, llama, make
from test_fake_quant import FORMATS, INF, NAN, draw, equal, of_tensor, ties

from qbench.quantizers import config_of, fake_quant
from qbench.quantizers import fake_quant_kernels as kernels
from qbench.quantizers.audit.activations import expected, groups_of
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.config import ActivationEvidence
from qbench.quantizers.formats import Scale

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = [
    *(f"int{b}-{per}" for b in (8, 4) for per in ("token", "tensor", "static")),
    "int6-token-asymmetric", "int8-static-asymmetric", "fp8-row", "fp8-tensor", "fp8-static",
    "mxfp8", "mxfp4", "nvfp4",
]  # fmt: skip


def odd(columns, dtype):
    x = draw(301, columns)
    x[1], x[2, 1], x[3, 2] = 0.0, NAN, INF
    x[4] *= 1e-30
    return x.to(dtype).cuda()


def moved(fixed, device):
    zero = None if fixed.zero is None else fixed.zero.to(device)
    return Scale(fixed.scale.to(device), zero)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 32, 384, 2816, 8200])
def test_the_kernel_is_the_definition_bit_for_bit(name, dtype, columns):
    form, x = FORMATS[name], odd(columns, dtype)
    for chosen in filter(None, (form, of_tensor(form))):
        fixed = None
        if chosen is not form:
            fixed = moved(fake_quant.scale_of_tensor(*torch.tensor([-2.0, 3.0]), chosen), "cuda")
        actual = kernels.fake_quantize_rows(x, chosen, fixed)
        assert equal(actual, fake_quant.fake_quantize_definition(x, chosen, fixed))
        there = None if fixed is None else moved(fixed, "cpu")
        assert equal(actual.cpu(), fake_quant.fake_quantize_definition(x.cpu(), chosen, there))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_and_the_audit_decide_ties_as_the_definition_does(name, dtype):
    size = {"float8_e8m0fnu": 32, "float8_e4m3fn": 16}.get(FORMATS[name].scale_dtype, 32)
    x, form = ties().to(dtype), replace(FORMATS[name], strategy="group", group_size=size)
    actual = fake_quant.fake_quantize(x.cuda(), form)
    assert equal(actual.cpu(), fake_quant.fake_quantize(x, form))
    about = ActivationEvidence(format=form)
    correct, _, _ = expected(groups_of(x.cuda().double(), about), about)
    off = (groups_of(actual.double(), about) - correct).abs()
    assert not (off > 4 * torch.finfo(dtype).eps * correct.abs()).any()


def on_gpu(stated, folder, dtype="bfloat16"):
    chosen = config_of(stated, compute_dtype=dtype)
    model, original = (
        llama("softpick", dtype=getattr(torch, dtype), device="cuda") for _ in range(2)
    )
    made = make(chosen, folder, model=model)
    return made, audit(original, made, chosen, PROBE)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("weights", [None, {"name": "gptq-4bit", "group_size": 32}])
def test_every_scheme_passes_its_audit(name, weights, tmp_path):
    stated = {"activations": name} | ({"weights": weights} if weights else {})
    _, report = on_gpu(stated, tmp_path)
    assert report.problems == ()
    assert len(report.activations.modules) == 14
