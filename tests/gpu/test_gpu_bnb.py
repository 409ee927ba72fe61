"""LLM.int8 on CUDA: inputs quantized once and without waiting, to the library's bits."""

import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quantizers"))

from bitsandbytes import functional
from quantizer_models import DIGEST, PROBE, llama, logits, settings

from qbench.quantizers import bnb
from qbench.quantizers.bnb import quantized
from qbench.quantizers.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:inner dimension:UserWarning"),
]


def inputs(rows, width, outliers, dtype):
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=draw)
    x[:, 5 : 5 + outliers] *= 20
    return x.to(dtype).cuda()


@pytest.mark.parametrize("threshold", [1.0, 6.0, 0.3])
@pytest.mark.parametrize("outliers", [0, 1, 7])
@pytest.mark.parametrize("rows", [1, 2, 3000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_codes_scales_and_columns_are_the_librarys(rows, outliers, threshold, dtype):
    x = inputs(rows, 1024, outliers, getattr(torch, dtype))
    x[0, 100] = torch.nan
    x[-1] = 9.0  # nothing but outliers
    codes, scales, columns = functional.int8_vectorwise_quant(x.half(), threshold=threshold)
    found = quantized(x, threshold)
    assert torch.equal(found.codes, codes)
    # Of a row of nothing but outliers, whose codes are 0, the library's is a float's least.
    assert torch.equal(found.scales.clamp(min=0), scales.clamp(min=0))
    known, values = found.outliers(x)
    assert torch.equal(known, columns)
    assert torch.equal(values.nan_to_num(), x[:, columns].nan_to_num())


@pytest.mark.parametrize("outliers", [0, 3])
def test_quantizing_does_not_wait(outliers):
    x = inputs(300, 1024, outliers, torch.bfloat16)
    quantized(x.clone(), 6.0).outliers(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantized(x, 6.0).outliers(x)  # but for the event of its own
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("hidden", [64, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_the_librarys_to_the_bit(threshold, hidden, dtype, tmp_path, monkeypatch):
    chosen = settings("bnb-8bit", threshold=threshold, compute_dtype=dtype)
    model = quantize(
        llama(dtype=getattr(torch, dtype), device="cuda", hidden=hidden, intermediate=hidden * 2),
        chosen,
        calibration=None,
        digest=DIGEST,
        artifacts=tmp_path,
    ).model
    texts = [PROBE, PROBE.repeat(32, 5), PROBE[:1, :1]]
    ours = [logits(model, tokens) for tokens in texts]
    monkeypatch.setattr(bnb.Linear8, "forward", bitsandbytes.nn.Linear8bitLt.forward)
    for tokens, found in zip(texts, ours, strict=True):
        assert torch.equal(found, logits(model, tokens))
