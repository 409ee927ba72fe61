"""A KV cache of few bits on CUDA: kernels against their definitions, scoring against decoding, and
what it costs."""

import pytest
import torch
from scoring_models import ask, choices, llama, pages, scorer

from qbench.attention.transformers import set_attention
from qbench.evaluation.settings import Tolerance
from qbench.quantizers.audit.kv_cache import measure_kv
from qbench.quantizers.fake_quant import KVFakeQuant
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of, settings_of

SCHEMES = {
    "token": "int4-token",
    "fp8": "fp8-token",
    # Of 2 bits a group's largest value lies between two codes, which are two thirds of it apart.
    "int4 in groups": {"name": "int4-token", "group_size": 16},
    "first tokens": {"name": "int4-token", "sink_tokens": 3},
}  # fmt: skip
LOOSE = Tolerance(mean=10.0, largest=10.0, changed=1.0)


def draw(batch, heads, tokens, width, dtype=torch.float32):
    """Laid out as [B, T, H, D], as transformers has it."""
    return torch.randn(batch, tokens, heads, width, device="cuda").to(dtype).transpose(1, 2)


ROUNDED = {
    "int4-token": {"sink_tokens": 3},
    "int2-token": {"group_size": 32},
    "int4-tensor": {"sink_tokens": 3},
    "fp8-token": {},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_gpu_rounds_as_a_cpu_to_the_bit(name, dtype):
    torch.manual_seed(0)
    x = (draw(2, 3, 333, 64) * torch.logspace(-3, 2, 64, device="cuda")).to(dtype)
    x[0, 0, 2] = 0
    positions = torch.arange(333, device="cuda", dtype=torch.int32)[None] - 5
    positions = torch.where(positions > 40, positions - 41, positions)  # two sequences
    cache = KVFakeQuant(settings_of(f"kv-{name}", ROUNDED[name]))
    assert torch.equal(cache.rounded(x, positions).cpu(), cache.rounded(x.cpu(), positions.cpu()))


def model_with(scheme, normalizer="softpick", dtype=torch.float32):
    model = llama(dtype=dtype, heads=4).cuda()
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype=str(dtype).split(".")[1])
    attended = set_attention(model, normalizer=normalizer, implementation="triton")
    assert attended == f"{normalizer}/triton"
    return apply(model, quantizer, {})


SIZES = {"max_length": 128, "batch_size": 16, "window_batch_size": 4, "batch_tokens": 4096}


def assert_close(actual, expected):
    """A value may lie on the border between two codes, and rounding then decide: of a few."""
    off = sorted(abs(a - b) for a, b in zip(actual, expected, strict=True))
    assert off[len(off) * 3 // 4] < 1e-2
    assert off[-1] < 1.0


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fast_scores_are_the_exact_ones_and_those_of_the_reference(scheme, normalizer):
    requests, texts = choices(40), pages((3, 75, 40, 300))
    model = model_with(scheme, normalizer)
    actual = {}
    for mode in ("exact", "fast"):
        one = scorer(model, mode, tolerance=LOOSE, **SIZES)
        actual[mode] = [a for a, _ in ask(one, requests)]
        actual[mode] += ask(one, texts)
    assert_close(actual["fast"], actual["exact"])
    set_attention(model, normalizer=normalizer, implementation="reference")
    one = scorer(model, "exact", tolerance=LOOSE, **SIZES)
    reference = [a for a, _ in ask(one, requests)]
    reference += ask(one, texts)
    assert_close(actual["exact"], reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_audit_passes_on_the_kernels(scheme, dtype):
    model = model_with(scheme, dtype=dtype)
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype=str(dtype).split(".")[1])
    audit, problems = measure_kv(model, quantizer, torch.randint(0, 400, (2, 100)))
    assert problems == []
    assert 1 < audit.levels <= 2**quantizer.precision.kv_cache.bits
