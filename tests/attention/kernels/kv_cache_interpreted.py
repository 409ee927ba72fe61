"""Kernels of a quantized KV cache, for interpreter.py: each case's name, and how far it is from the
definition."""

from functools import partial
from types import SimpleNamespace

import torch
from attention_cases import NORMALIZERS
from normalizer_parameters import parameters

from qbench.attention import kv_cache
from qbench.attention.kernels.varlen import packed_spans
from qbench.attention.kv_cache import Sources

Kept = partial(SimpleNamespace, keep_first=0, keep_recent=0, key_group=1)
RESIDUALS = {
    "softpick": Kept(keep_first=3, keep_recent=7),
    "softmax": Kept(keep_first=2, keep_recent=5, key_group=8),
    "rectified": Kept(keep_recent=90),  # nothing is quantized yet
}


def draw(batch, heads, tokens, width):
    """Laid out as [B, T, H, D], as transformers has it."""
    return torch.randn(batch, tokens, heads, width).transpose(1, 2)


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def one():
    yield "softpick, shaped", max(shaped("softpick"))


def attends():
    """Relative errors of the two-source kernel against the definition."""
    for normalizer, residual in RESIDUALS.items():
        yield normalizer, max(layouts(residual, normalizer))
    for normalizer in NORMALIZERS:
        yield f"{normalizer}, shaped", max(shaped(normalizer))


def shaped(normalizer):
    """With the normalizer's parameters, slopes, a soft cap, a window, and a few steps of decoding;
    with holes in a mask, which say how many keys each query sees."""
    given = parameters(normalizer, 2, dtype=torch.float32, slopes=True)
    options = {"cache": RESIDUALS["softmax"], "normalizer": normalizer, "parameters": given}
    query = draw(2, 2, 25, 16) * 2
    sources = Sources(*(draw(2, 1, 25, 16) for _ in range(4)))
    positions = torch.arange(25)[None].int()
    mask = (torch.rand(2, 1, 25, 25) < 0.7).tril()
    for rows, changes in (
        (slice(0, 25), {"causal": True, "softcap": 2.0, "window": 9}),
        (slice(23, 25), {"causal": True, "softcap": 2.0}),
        (slice(0, 25), {"mask": mask}),
    ):
        found, wanted = (
            function(query[:, :, rows], sources, positions=positions, **options, **changes)
            for function in (kv_cache.kernel_attention, kv_cache.attention)
        )
        yield error(found, wanted)


def layouts(residual, normalizer):
    options = {"cache": residual, "normalizer": normalizer}
    query = draw(2, 2, 41, 16) * 2
    sources = Sources(*(draw(2, 1, 41, 16) for _ in range(4)))
    # whole, with padding on the left, windowed, and a few steps of decoding
    positions = torch.stack([torch.arange(41), torch.arange(-6, 35)]).int()
    mask = (positions >= 0)[:, None, None] & torch.ones(41, 41, dtype=torch.bool).tril()
    spans = torch.tensor([[0, 0, 41, 0, 41, 0], [1, 6, 41, 6, 41, 0]], dtype=torch.int32)
    expected = kv_cache.attention(query, sources, positions=positions, mask=mask, **options)
    by_mask = kv_cache.kernel_attention(query, sources, positions=positions, mask=mask, **options)
    yield error(by_mask, expected)
    options |= {"causal": True}
    by_span = kv_cache.kernel_attention(query, sources, positions=positions, spans=spans, **options)
    yield error(by_span, expected)
    plain = positions[:1]
    for changes in ({}, {"window": 9}):
        for rows in (slice(0, 41), slice(39, 41)):
            found, wanted = (
                function(query[:, :, rows], sources, positions=plain, **options, **changes)
                for function in (kv_cache.kernel_attention, kv_cache.attention)
            )
            yield error(found, wanted)
    # packed, the third sequence with fewer queries than keys
    edges = torch.tensor([0, 9, 10, 20]), torch.tensor([0, 9, 10, 41])
    places = torch.cat([torch.arange(n) for n in (9, 1, 31)])[None].int()
    row = Sources(*(tensor[:1] for tensor in sources))
    found, wanted = (
        function(query[:1, :, :20], row, positions=places, spans=packed_spans(*edges), **options)
        for function in (kv_cache.kernel_attention, kv_cache.attention)
    )
    yield error(found, wanted)
