"""What the benches share: inputs as models have them, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from qbench.attention.normalizers import NORMALIZERS, SLOPES


def random_tensor(batch: int, length: int, heads: int, head_dim: int) -> Tensor:
    """[B, H, T, D] in bf16 with the memory of [B, T, H, D], as models have it."""
    shape = (batch, length, heads, head_dim)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def given(
    normalizer: str, heads: int, *, sloped: bool = False, trained: bool = False
) -> dict[str, Tensor]:
    """A normalizer's parameters [heads] on the GPU, each head another; slopes as ALiBi's paper has
    them. Where there is a default without a tensor, that."""
    found = {}
    for parameter in NORMALIZERS.get(normalizer).parameters:
        if parameter is SLOPES:
            if sloped:
                slopes = torch.tensor(parameter.start(heads), device="cuda")
                found[parameter.name] = slopes.requires_grad_(trained)
        elif parameter.required:
            spread = torch.linspace(0.8, 1.2, heads, device="cuda")
            found[parameter.name] = (spread * (parameter.initial or 1)).requires_grad_(trained)
    return found


def milliseconds(run: Callable[[], Any], repeat_ms: int) -> float:
    """Median of CUDA-event timings over ``repeat_ms``, after a warm-up of half as long."""
    return do_bench(run, warmup=repeat_ms // 2, rep=repeat_ms, return_mode="median")


def captured(make: Callable[[], Callable[[], Any]]) -> Callable[[], None]:
    """The replay of a CUDA graph of what ``make()`` gives, which is called once before. It is made
    on the stream that is captured: tensors that need gradients must not have seen another. What it
    holds lives as long as the replay: a graph knows the addresses of what it reads, no tensors, and
    the next capture gives memory that nobody holds back to the driver."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = make()
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], Any]) -> None:
    """``run``: is only held."""
    graph.replay()


def sparse_keys(query: Tensor, key: Tensor) -> Tensor:
    """Keys turned so that one in a hundred has a positive score."""
    scores = (query.float() * key.float()).sum(-1, keepdim=True)
    positive = torch.rand_like(scores) < 0.01
    return torch.where((scores > 0) == positive, key, -key)
