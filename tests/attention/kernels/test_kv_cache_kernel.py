"""The kernel of a quantized KV cache in Triton's interpreter, held to its definition."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_cases import NORMALIZERS
from normalizer_parameters import parameters

from qbench.attention import kv_cache
from qbench.attention.kernels import ops
from qbench.attention.kernels.varlen import packed_spans
from qbench.attention.kv_cache import Sources

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
LIMIT = 1e-5  # relative
Kept = partial(SimpleNamespace, keep_first=0, keep_recent=0, key_group=1)
RESIDUALS = {
    "softpick": Kept(keep_first=3, keep_recent=7),
    "softmax": Kept(keep_first=2, keep_recent=5, key_group=8),
    "rectified": Kept(keep_recent=90),  # nothing is quantized yet
}


def draw(batch, heads, tokens, width):
    """Laid out as [B, T, H, D], as transformers has it."""
    return torch.randn(batch, tokens, heads, width).transpose(1, 2)


def assert_equal(query, sources, expected=None, **options):
    found = kv_cache.kernel_attention(query, sources, **options)
    if expected is None:
        expected = kv_cache.attention(query, sources, **options)
    assert float((found - expected).norm() / expected.norm()) <= LIMIT


@pytest.mark.parametrize(
    "normalizer",
    [
        "softpick",
        *(pytest.param(n, marks=pytest.mark.slow) for n in NORMALIZERS if n != "softpick"),
    ],
)
def test_scores_of_every_shape(normalizer):
    """With the normalizer's parameters, slopes, a soft cap, a window, and a few steps of decoding;
    with holes in a mask, which say how many keys each query sees."""
    torch.manual_seed(0)
    given = parameters(normalizer, 2, dtype=torch.float32, slopes=True)
    options = {"cache": RESIDUALS["softmax"], "normalizer": normalizer, "parameters": given}
    options["positions"] = torch.arange(25)[None].int()
    query = draw(2, 2, 25, 16) * 2
    sources = Sources(*(draw(2, 1, 25, 16) for _ in range(4)))
    assert_equal(query, sources, causal=True, softcap=2.0, window=9, **options)
    assert_equal(query[:, :, 23:], sources, causal=True, softcap=2.0, **options)
    assert_equal(query, sources, mask=(torch.rand(2, 1, 25, 25) < 0.7).tril(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", RESIDUALS)
def test_sequences_of_every_layout(normalizer):
    torch.manual_seed(0)
    options = {"cache": RESIDUALS[normalizer], "normalizer": normalizer}
    query = draw(2, 2, 41, 16) * 2
    sources = Sources(*(draw(2, 1, 41, 16) for _ in range(4)))
    # with padding on the left, by a mask and by spans
    positions = torch.stack([torch.arange(41), torch.arange(-6, 35)]).int()
    mask = (positions >= 0)[:, None, None] & torch.ones(41, 41, dtype=torch.bool).tril()
    spans = torch.tensor([[0, 0, 41, 0, 41, 0], [1, 6, 41, 6, 41, 0]], dtype=torch.int32)
    expected = kv_cache.attention(query, sources, positions=positions, mask=mask, **options)
    assert_equal(query, sources, expected, positions=positions, mask=mask, **options)
    options |= {"causal": True}
    assert_equal(query, sources, expected, positions=positions, spans=spans, **options)
    for window in (None, 9):
        for rows in (slice(0, 41), slice(39, 41)):
            plain = {"positions": positions[:1], "window": window}
            assert_equal(query[:, :, rows], sources, **plain, **options)
    # packed, the third sequence with fewer queries than keys
    edges = torch.tensor([0, 9, 10, 20]), torch.tensor([0, 9, 10, 41])
    places = torch.cat([torch.arange(n) for n in (9, 1, 31)])[None].int()
    row = Sources(*(tensor[:1] for tensor in sources))
    options |= {"positions": places, "spans": packed_spans(*edges)}
    assert_equal(query[:1, :, :20], row, **options)


def test_it_is_launched_on_the_device_of_its_tensors(monkeypatch):
    asked, real = [], ops.on_device
    monkeypatch.setattr(
        ops, "on_device", lambda device: (asked.append(device.type), real(device))[1]
    )
    query = torch.randn(1, 1, 20, 16)
    kv_cache.kernel_attention(
        query, Sources(query, query, query, query), positions=torch.arange(20)[None],
        cache=Kept(keep_recent=4), normalizer="softmax",
    )  # fmt: skip
    assert asked == ["cpu"]
