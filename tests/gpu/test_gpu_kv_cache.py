"""A KV cache of few bits on CUDA: kernels against their definitions, scoring against decoding, and
what it costs."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pair import loss, pair_model, texts
from scoring_models import choices, llama, pages, tokenizer

from qbench.attention import kv_cache
from qbench.attention.kernels.varlen import packed_spans
from qbench.attention.kv_cache import Sources
from qbench.attention.transformers import attend
from qbench.evaluation import settings
from qbench.evaluation.scoring import language_model
from qbench.evaluation.settings import Tolerance
from qbench.quantizers.audit.kv_cache import measure_kv
from qbench.quantizers.kv_fake_quant import KVFakeQuant
from qbench.quantizers.names import KV_CACHES, config_of
from qbench.quantizers.quantize import apply

SCHEMES = {
    "token": "int4-token",
    "fp8": "fp8-token",
    "int2 in groups": {"name": "int2-token", "group_size": 16, "symmetric": False},
    "first tokens": {"name": "int4-token", "keep_first": 3},
    "first and recent tokens": {"name": "int3-token", "keep_first": 2, "keep_recent": 6},
    "kivi": {"name": "int4-channel", "group_size": 16},
    "kivi, recent, before RoPE": {
        "name": "int3-channel", "group_size": 16, "keep_recent": 8, "before_rope": True,
    },
}  # fmt: skip
LOOSE = Tolerance(mean=10.0, largest=10.0, changed=1.0)


def draw(batch, heads, tokens, width, dtype=torch.float32):
    """Laid out as [B, T, H, D], as transformers has it."""
    return torch.randn(batch, tokens, heads, width, device="cuda").to(dtype).transpose(1, 2)


ROUNDED = {
    "int4-token": {"keep_first": 3},
    "int2-token": {"symmetric": False, "group_size": 32},
    "int3-channel": {"group_size": 32, "keep_first": 3, "scale_dtype": "float32"},
    "int4-tensor": {"symmetric": False, "keep_first": 3},
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
    cache = KVFakeQuant(KV_CACHES.parse(name, ROUNDED[name]))
    found = cache.rounded(x, x, positions)
    wanted = cache.rounded(x.cpu(), x.cpu(), positions.cpu())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


Kept = partial(SimpleNamespace, keep_first=0, keep_recent=0, key_group=1)
RESIDUALS = [
    Kept(keep_recent=70),
    Kept(keep_first=3, keep_recent=18),
    Kept(key_group=32),
    Kept(keep_first=4, keep_recent=40, key_group=64),
    Kept(keep_recent=4000),
]


@pytest.mark.parametrize(("normalizer", "dtype", "width", "limit"), [
    ("softmax", torch.bfloat16, 64, 1e-2),
    ("softpick", torch.bfloat16, 64, 1e-2),
    ("softpick", torch.bfloat16, 128, 1e-2),
    ("rectified", torch.bfloat16, 64, 1e-2),
    ("softpick", torch.float32, 64, 2e-5),
])  # fmt: skip
def test_two_sources_are_read_as_the_definition_reads_them(normalizer, dtype, width, limit):
    torch.manual_seed(0)
    tokens = 517
    for residual in RESIDUALS:
        options = {"cache": residual, "normalizer": normalizer, "causal": True}
        query = draw(2, 4, tokens, width, dtype) * 2
        sources = Sources(*(draw(2, 2, tokens, width, dtype) for _ in range(4)))
        places = torch.arange(tokens, device="cuda", dtype=torch.int32)[None]
        whole, last = slice(0, tokens), slice(tokens - 3, tokens)
        for changes, rows in (({}, whole), ({}, last), ({"window": 100}, whole)):
            found, wanted = (
                function(query[:, :, rows], sources, positions=places, **options, **changes)
                for function in (kv_cache.kernel_attention, kv_cache.attention)
            )
            assert_near(found, wanted, limit)
        edges = torch.tensor([0, 9, 10, 30]).cuda(), torch.tensor([0, 9, 10, tokens]).cuda()
        places = torch.cat([torch.arange(n) for n in (9, 1, tokens - 10)])[None].int().cuda()
        row = Sources(*(tensor[:1] for tensor in sources))
        spans = packed_spans(*edges)
        found, wanted = (
            function(query[:1, :, :30], row, positions=places, spans=spans, **options)
            for function in (kv_cache.kernel_attention, kv_cache.attention)
        )
        assert_near(found, wanted, limit)


def assert_near(found, wanted, limit):
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < limit


def model_with(scheme, normalizer="softpick", dtype=torch.float32):
    model = llama(dtype=dtype, heads=4).cuda()
    assert attend(model, normalizer=normalizer) == f"{normalizer}/triton"
    if scheme is None:
        return model
    return apply(
        model, config_of({"kv": SCHEMES[scheme]}, compute_dtype=str(dtype).split(".")[1]), {}
    )


def scorer(model, mode):
    fast = {"batch_tokens": 4096, "sample": 8} if mode == "fast" else {}
    chosen = settings.ScoringSettings(
        mode=mode, max_length=128, batch_size=16, window_batch_size=4, tolerance=LOOSE, **fast
    )
    return language_model(model, tokenizer(), chosen)


def assert_close(found, expected):
    """A value may lie on the border between two codes, and rounding then decide: of a few."""
    off = sorted(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert off[len(off) * 3 // 4] < 1e-2
    assert off[-1] < 1.0


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fast_scores_are_the_exact_ones_and_those_of_the_reference(scheme, normalizer):
    requests, texts = choices(40), pages((3, 75, 40, 300))
    model = model_with(scheme, normalizer)
    found = {}
    for mode in ("exact", "fast"):
        one = scorer(model, mode)
        found[mode] = [a for a, _ in one.loglikelihood(requests, disable_tqdm=True)]
        found[mode] += one.loglikelihood_rolling(texts, disable_tqdm=True)
    assert_close(found["fast"], found["exact"])
    attend(model, normalizer=normalizer, implementation="reference")
    one = scorer(model, "exact")
    reference = [a for a, _ in one.loglikelihood(requests, disable_tqdm=True)]
    reference += one.loglikelihood_rolling(texts, disable_tqdm=True)
    assert_close(found["exact"], reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_audit_passes_on_the_kernels(scheme, dtype):
    model = model_with(scheme, dtype=dtype)
    quantizer = config_of({"kv": SCHEMES[scheme]}, compute_dtype=str(dtype).split(".")[1])
    audit, problems = measure_kv(model, quantizer, torch.randint(0, 400, (2, 100)))
    assert problems == []
    assert 1 < audit.levels <= 2**quantizer.precision.kv_cache.bits


FLOORS = {  # nats a token, softmax and softpick: measured by an independent implementation
    "int4-token": (0.0223, 0.0226),
    "int4-tensor": (0.0977, 0.0674),
    "int3-token": (0.143, 0.104),
    "int2-token": (1.91, 1.83),
}


@pytest.mark.parametrize("name", ["softmax", "softpick"])
def test_damage_is_what_others_measured_on_the_trained_pair(name, capsys):
    """15 x 1,024 tokens of WikiText in float32, in batches of 4."""
    ids = texts(name)
    before = loss(pair_model(name, "cuda"), ids, 4)
    found = {}
    for scheme in FLOORS:
        quantizer = config_of({"kv": scheme}, compute_dtype="float32")
        model = apply(pair_model(name, "cuda"), quantizer, {})
        found[scheme] = loss(model, ids, 4) - before
    with capsys.disabled():
        print(f"\n{name}: loss {before:.4f}, damage {found}")
    for scheme, damage in found.items():
        assert damage == pytest.approx(FLOORS[scheme][name == "softpick"], rel=0.15)
