"""Every quantizer on CUDA: audited, reloaded, and close to what the CPU gives."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quantizers"))

from bitsandbytes import functional
from quantizer_models import (
    DIGEST,
    PROBE,
    calibration,
    damage,
    llama,
    logits,
    make,
    settings,
)

from qbench.files import file_digest
from qbench.quantizers import bnb, parse
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.calibration import read_calibration
from qbench.quantizers.linear import plain
from qbench.quantizers.quantize import quantize
from qbench.quantizers.texts import CalibrationText

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # bitsandbytes has a faster kernel for widths that the tiny model does not have.
    pytest.mark.filterwarnings("ignore:inner dimension:UserWarning"),
]

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
    return quantize(
        llama(normalizer, dtype=getattr(torch, chosen.compute_dtype), device="cuda"),
        chosen,
        calibration=calibration() if chosen.needs_calibration else None,
        digest=DIGEST,
        artifacts=artifacts,
    )


@pytest.mark.parametrize(("name", "stated"), CASES)
def test_every_quantizer_passes_its_audit_and_reloads_the_same(name, stated, tmp_path):
    chosen = settings(name, **{"compute_dtype": "bfloat16", **stated})
    dtype = getattr(torch, chosen.compute_dtype)
    first = on_gpu(chosen, tmp_path)
    report = audit(llama("softpick", dtype=dtype, device="cuda"), first.model, chosen, PROBE)
    assert report.problems == ()
    assert (report.passed, report.coverage) == (True, 1.0)
    assert first.model.config._attn_implementation == "qbench-softpick-reference"
    assert {p.device.type for p in first.model.parameters()} == {"cuda"}
    second = on_gpu(chosen, tmp_path)
    assert "reused" in second.detail
    assert torch.equal(logits(first.model), logits(second.model))


@pytest.mark.parametrize("name", ["rtn-3bit", "hqq-3bit", "bnb-4bit", "bnb-8bit"])
def test_the_gpu_gives_what_the_cpu_gives(name, tmp_path):
    chosen = settings(name)
    original = llama("softpick")
    here = damage(make(chosen, tmp_path, "softpick").model, original)
    there = damage(
        on_gpu(chosen, tmp_path).model, llama("softpick", device="cuda"), PROBE.to("cuda")
    )
    assert there == pytest.approx(here, rel=0.2)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_beats_rounding_to_the_same_grid(bits, tmp_path):
    original = llama("softpick", device="cuda")
    text = calibration(seed=5).ids.to("cuda")
    ours, rounded = (
        damage(on_gpu(settings(name, **stated), tmp_path).model, original, text)
        for name, stated in ((f"gptq-{bits}bit", {}), (f"rtn-{bits}bit", {"symmetric": True}))
    )
    assert ours < rounded


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("bnb-4bit", {}),
        ("bnb-8bit", {}),
        ("hqq-2bit", {}),
        ("rtn-3bit", {}),
        ("gptq-2bit", {}),
        ("gptq-3bit", {}),
    ],
)
def test_a_trained_softpick_model_passes_its_audit(name, stated, tmp_path):
    shared = Path(__file__).parents[3] / "shared"
    folder = shared / "checkpoints" / "softpick-27M"
    texts = sorted((shared / "data" / "calibration").glob("*.jsonl"))
    if not folder.is_dir() or not texts:
        pytest.skip("needs a trained softpick checkpoint and calibration text in ../shared")
    from qbench.checkpoints import find
    from qbench.checkpoints.load import load_model, load_tokenizer

    checkpoint = find(str(folder))
    chosen = parse(name, stated)

    def load():
        return load_model(checkpoint, dtype=torch.bfloat16, device="cuda", attention="reference")

    source = CalibrationText(
        path=texts[0], digest=file_digest(texts[0]), samples=8, length=512, seed=0
    )
    text = read_calibration(source, load_tokenizer(checkpoint))
    made = quantize(load(), chosen, calibration=text, digest=checkpoint.digest, artifacts=tmp_path)
    report = audit(load(), made.model, chosen, text.ids[:1, :256])
    assert report.problems == ()
    assert report.passed
    assert made.model.config._attn_implementation == "qbench-softpick-reference"


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
    here = bnb.from_packed(plain(layer), stored, chosen.weights)
    moved = {name: tensor.cuda() for name, tensor in stored.items()}
    there = bnb.from_packed(plain(layer.cuda()), moved, chosen.weights)
    state = there.weight.quant_state
    theirs = functional.dequantize_4bit(there.weight.data, state).float().cpu()
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == "float32" else {"rtol": 5e-3, "atol": 1e-6}
    torch.testing.assert_close(bnb.decode(there).cpu(), theirs, **close)
    torch.testing.assert_close(bnb.decode(here), theirs, **close)
