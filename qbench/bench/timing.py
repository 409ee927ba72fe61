"""What the benches of kernels share: shapes and inputs as models have them, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from qbench.attention.normalizers import NORMALIZERS, SLOPES

CAP, WINDOW = 20.0, 1024
VARIANTS = {"causal": {}, "ALiBi": {}, "soft cap": {"softcap": CAP}, "window": {"window": WINDOW}}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of causal attention; ``variants`` are those that are measured of it, or checked.
    ``queries``: None for as many as keys."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    variants: tuple[str, ...] = ("causal",)
    queries: int | None = None

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        length = f"{self.length}" if self.queries is None else f"{self.queries}/{self.length}"
        return f"B{self.batch} T{length} H{heads} D{self.head_dim}"

    def tensors(self) -> list[Tensor]:
        """Queries, keys, values."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        lengths = (self.queries or self.length, self.length, self.length)
        return [
            random_tensor(self.batch, length, heads, self.head_dim).requires_grad_()
            for length, heads in zip(lengths, counts, strict=True)
        ]

    def settings(self, normalizer: str, variant: str) -> dict[str, Any]:
        """What an attention function is given beside the tensors."""
        parameters = given(normalizer, self.heads, sloped=variant == "ALiBi")
        settings = {"normalizer": normalizer, "parameters": parameters, "causal": True}
        return settings | VARIANTS[variant]

    def flop(self, variant: str) -> float:
        """Of a forward pass."""
        seen = min(WINDOW, self.length) if variant == "window" else self.length
        pairs = seen * (seen + 1) / 2 + (self.length - seen) * seen
        return 4 * self.batch * self.heads * self.head_dim * pairs


def random_tensor(batch: int, length: int, heads: int, head_dim: int) -> Tensor:
    """[B, H, T, D] in bf16 with the memory of [B, T, H, D], as models have it."""
    shape = (batch, length, heads, head_dim)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def given(normalizer: str, heads: int, *, sloped: bool = False) -> dict[str, Tensor]:
    """A normalizer's parameters [heads] on the GPU, each head another; slopes as ALiBi's paper has
    them. Where there is a default without a tensor, that."""
    found = {}
    for parameter in NORMALIZERS.get(normalizer).parameters:
        if parameter is SLOPES and sloped:
            found[parameter.name] = torch.tensor(parameter.start(heads), device="cuda")
        elif parameter.required:
            spread = torch.linspace(0.8, 1.2, heads, device="cuda") * (parameter.initial or 1)
            found[parameter.name] = spread.requires_grad_(parameter.trainable)
    return found


def milliseconds(run: Callable[[], Any], repeat_ms: int) -> float:
    """Median of CUDA-event timings over ``repeat_ms``, after a warm-up of half as long."""
    return do_bench(run, warmup=repeat_ms // 2, rep=repeat_ms, return_mode="median")


def sparse_keys(query: Tensor, key: Tensor) -> Tensor:
    """Keys turned so that one in a hundred has a positive score."""
    scores = (query.float() * key.float()).sum(-1, keepdim=True)
    positive = torch.rand_like(scores) < 0.01
    return torch.where((scores > 0) == positive, key, -key)
