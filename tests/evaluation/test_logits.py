"""Kernels over logits give what float64 gives."""

import os

import pytest
import torch

pytest.importorskip("triton")
from qbench.evaluation.logits import divergence, log_sums

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter's, of NaN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 2_501, *([32_000, 50_257] * (DEVICE == "cuda"))])
def test_sums_and_divergences_are_those_of_float64(vocabulary, dtype):
    torch.manual_seed(vocabulary)
    before = 3 * torch.randn(7, vocabulary, device=DEVICE)
    after = before + 0.3 * torch.randn_like(before)
    after[0] = before[0]
    before[1, 7] = before[1, 9] = after[1, 7] = 40  # the first of two is the likeliest
    before[2, 11], after[2, 200] = 40, 40
    before, after = before.to(dtype), after.to(dtype)
    kl, log_p, log_q, agrees = divergence(before, after)
    p, q = before.double(), after.double()
    expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    assert kl[0] == 0
    assert log_p[0] == log_q[0]
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=5e-6)
    for sums, logits in ((log_p, p), (log_q, q)):
        torch.testing.assert_close(sums.double(), logits.logsumexp(-1), rtol=1e-6, atol=0)
    assert torch.equal(agrees, before.argmax(-1) == after.argmax(-1))
    sums, tops = log_sums(before)
    assert torch.equal(sums, log_p)
    assert torch.equal(tops, before.argmax(-1))
    before[3, 5] = torch.nan
    assert divergence(before, after)[0].isnan().nonzero().tolist() == [[3]]
    assert log_sums(before)[0].isnan().nonzero().tolist() == [[3]]
