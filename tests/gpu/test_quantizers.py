"""Every quantizer on CUDA: audited, reloaded, and close to what the CPU gives."""

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from quantizer_models import PROBE, llama, logits, make_with_detail, settings

from qbench.quantizers import bnb
from qbench.quantizers.audit.compare import audit

# bitsandbytes has a faster kernel for widths that the tiny model does not have.
pytestmark = pytest.mark.filterwarnings("ignore:inner dimension:UserWarning")

CASES = [
    ("bnb-4bit", {}),
    ("bnb-4bit", {"quant_type": "fp4", "double_quant": True}),
    ("bnb-8bit", {}),
    ("bnb-8bit", {"threshold": 0.0, "compute_dtype": "float16"}),
    *((f"hqq-{bits}bit", {}) for bits in (2, 3, 4, 8)),
    ("hqq-4bit", {"axis": 0, "compute_dtype": "float32"}),
    *((f"rtn-{bits}bit", {}) for bits in (2, 3, 4, 8)),
    ("gptq-4bit", {"desc_act": True, "compute_dtype": "float32"}),
    *((f"gptq-{bits}bit", {}) for bits in (2, 3, 4, 8)),
    ("gptq-4bit", {"desc_act": True, "symmetric": False}),
]


def on_gpu(chosen, artifacts, normalizer="softpick"):
    model = llama(normalizer, dtype=getattr(torch, chosen.compute_dtype), device="cuda")
    return make_with_detail(chosen, artifacts, model=model)


@pytest.mark.parametrize(("name", "stated"), CASES)
def test_every_quantizer_passes_its_audit_and_reloads_the_same(name, stated, tmp_path):
    chosen = settings(name, **{"compute_dtype": "bfloat16", **stated})
    dtype = getattr(torch, chosen.compute_dtype)
    first, _ = on_gpu(chosen, tmp_path)
    report = audit(llama("softpick", dtype=dtype, device="cuda"), first, chosen, PROBE)
    assert report.problems == ()
    assert (report.passed, report.coverage) == (True, 1.0)
    assert first.config._attn_implementation == "qbench-softpick-reference"
    assert {p.device.type for p in first.parameters()} == {"cuda"}
    second, detail = on_gpu(chosen, tmp_path)
    assert "reused" in detail
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize("threshold", [0.0, 0.5, 6.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int8_layers_that_share_codes_give_the_librarys_logits(
    dtype, threshold, tmp_path, monkeypatch
):
    model, _ = on_gpu(settings("bnb-8bit", compute_dtype=dtype, threshold=threshold), tmp_path)
    ours = logits(model)
    monkeypatch.setattr(bnb.Linear8, "forward", bitsandbytes.nn.Linear8bitLt.forward)
    assert torch.equal(ours, logits(model))


@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 160])
@pytest.mark.parametrize(("table", "double"), [("nf4", False), ("fp4", False), ("nf4", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_4_bit_codes_ourselves_gives_what_the_librarys_gpu_kernel_gives(
    width, table, double, dtype
):
    """And so do the codes that a CPU has made."""
    layer = torch.nn.Linear(width, 40, bias=False, dtype=getattr(torch, dtype))
    chosen = settings("bnb-4bit", quant_type=table, double_quant=double, compute_dtype=dtype)
    stored = bnb.quantize("layer", layer, chosen.weights)
    here = bnb.from_packed(layer, stored, chosen.weights)
    moved = {name: tensor.cuda() for name, tensor in stored.items()}
    there = bnb.from_packed(layer, moved, chosen.weights)
    state = there.weight.quant_state
    theirs = functional.dequantize_4bit(there.weight.data, state).float().cpu()
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == "float32" else {"rtol": 5e-3, "atol": 1e-6}
    torch.testing.assert_close(bnb.decode(there).cpu(), theirs, **close)
    torch.testing.assert_close(bnb.decode(here), theirs, **close)
