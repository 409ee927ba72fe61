"""Activations on CUDA: the kernel equals the definitions, and what simulating costs."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quantizers"))

from quantizer_models import DIGEST, PROBE, calibration, llama
from test_rounding import GRIDS, INF, NAN, draw, ties
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.attention.transformers import attend
from qbench.quantizers import config_of, formats
from qbench.quantizers.activations import kernel, ranges, rounding
from qbench.quantizers.activations.quantize import fixed_by
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.config import ActivationEvidence
from qbench.quantizers.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
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


def same(found, expected):
    """Bit for bit, but for the sign of zeros and what kind of NaN there is."""
    pair = [tensor.nan_to_num(0.0) + 0.0 for tensor in (found, expected)]
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(*pair)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 32, 384, 2816, 8200])
def test_the_kernel_is_the_definition_bit_for_bit(name, dtype, columns):
    grid, x = GRIDS[name], odd(columns, dtype)
    fixed = fixed_by(torch.tensor(-2.0).cuda(), torch.tensor(3.0).cuda(), grid)
    given = [(None, None), (fixed.scale, fixed.zero)]
    for scale, zero in given[:1] if grid.scale_format == "e8m0" else given:
        assert same(kernel.rounded(x, grid, scale, zero), rounding.rounded(x, grid, scale, zero))
        assert same(  # and on a CPU
            kernel.rounded(x, grid, scale, zero).cpu(),
            rounding.rounded(x.cpu(), grid, *(t if t is None else t.cpu() for t in (scale, zero))),
        )


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_and_the_audit_decide_ties_as_the_definition_does(name, dtype):
    grid = GRIDS[name]
    size = {"e8m0": 32, "e4m3": 16}.get(grid.scale_format, 32)
    x = ties().to(dtype).view(-1, size)
    given = fixed_by(*torch.aminmax(x.cuda()), grid)
    for fixed in [None] if grid.scale_format == "e8m0" else [None, given]:
        scale, zero = (fixed.scale, fixed.zero) if fixed else (None, None)
        found = kernel.rounded(x.cuda(), grid, scale, zero)
        there = rounding.rounded(x, grid, *(t if t is None else t.cpu() for t in (scale, zero)))
        assert same(found.cpu(), there)
        about = ActivationEvidence(
            grid=grid, scale_of="text" if fixed else "group", group=size, scale=scale, zero=zero
        )
        shape = formats.groups_of(x, about).shape
        wanted, _, _ = formats.expected(x.cuda().double().view(shape), about)
        off = (found.double().view(shape) - wanted).abs()
        assert not (off > 4 * torch.finfo(dtype).eps * wanted.abs()).any()


def on_gpu(stated, folder, dtype="bfloat16"):
    chosen = config_of(stated, compute_dtype=dtype)
    model = llama("softpick", dtype=getattr(torch, dtype), device="cuda")
    made = quantize(
        model,
        chosen,
        calibration=calibration() if chosen.needs_calibration else None,
        digest=DIGEST,
        artifacts=folder,
    )
    original = llama("softpick", dtype=getattr(torch, dtype), device="cuda")
    return made, audit(original, made.model, chosen, PROBE)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("weights", [None, {"name": "gptq-4bit", "group_size": 32}])
def test_every_scheme_passes_its_audit(name, weights, tmp_path):
    stated = {"activations": name} | ({"weights": weights} if weights else {})
    _, report = on_gpu(stated, tmp_path)
    assert report.problems == ()
    assert len(report.activations.modules) == 14


def test_counting_values_does_not_wait_for_the_device():
    x = odd(2816, torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
    here, there = (ranges.Seen(t.device, counted=True) for t in (x, x.cpu()))
    there.add(x.cpu())
    try:
        torch.cuda.set_sync_debug_mode("error")
        here.add(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(here.counts.cpu(), there.counts)


def wide(layers=4):
    """The shape of the papers' 340M models, fewer layers."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    attend(model, normalizer="softpick", implementation="triton")
    return model


def seconds(model, ids):
    """Median of a forward of the decoder as fast scoring runs it, after two to warm up."""
    taken = []
    with torch.no_grad():
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.model(ids, use_cache=False)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return sorted(taken[2:])[3]


@pytest.mark.parametrize(
    "name",
    ["int8-token", "int4-token-asymmetric", "int8-static", "int8-tensor", "fp8-row", "mxfp4"],
)
def test_what_quantizing_activations_costs(name, tmp_path):
    """Of the unquantized decoder's time, 16 × 2,048 tokens; the issue allows 1.6 of scoring's."""
    ids = torch.randint(0, 1000, (16, 2048), device="cuda")
    plain = seconds(wide(), ids)
    chosen = config_of({"activations": name}, compute_dtype="bfloat16")
    text = calibration() if chosen.needs_calibration else None
    made = quantize(wide(), chosen, calibration=text, digest=DIGEST, artifacts=tmp_path)
    ratio = seconds(made.model, ids) / plain
    print(f"{name}: {ratio:.2f} times the unquantized decoder's {plain * 1e3:.1f} ms")
    assert ratio < 1.6
