"""Shapes, inputs and the clock that the benches of kernels share."""

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
    """The shape of causal attention. ``variants``: those that are timed or checked with it.
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
        """Return random query, key and value."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        lengths = (self.queries or self.length, self.length, self.length)
        return [
            random_tensor(self.batch, length, heads, self.head_dim).requires_grad_()
            for length, heads in zip(lengths, counts, strict=True)
        ]

    def settings(self, normalizer: str, variant: str) -> dict[str, Any]:
        """Return the keyword arguments of an attention function."""
        parameters = given(normalizer, self.heads, sloped=variant == "ALiBi")
        settings = {"normalizer": normalizer, "parameters": parameters, "causal": True}
        return settings | VARIANTS[variant]

    def flop(self, variant: str) -> float:
        """Return the FLOP of a forward pass."""
        seen = min(WINDOW, self.length) if variant == "window" else self.length
        pairs = seen * (seen + 1) / 2 + (self.length - seen) * seen
        return 4 * self.batch * self.heads * self.head_dim * pairs


def random_tensor(batch: int, length: int, heads: int, head_dim: int) -> Tensor:
    """Return a random bf16 tensor [B, H, T, D] with the memory layout [B, T, H, D] of models."""
    shape = (batch, length, heads, head_dim)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def given(normalizer: str, heads: int, *, sloped: bool = False) -> dict[str, Tensor]:
    """Return the parameters [heads] of ``normalizer`` on the GPU, another value per head; ALiBi's
    slopes as in its paper if ``sloped``. Optional parameters are left out."""
    parameters = {}
    for parameter in NORMALIZERS.get(normalizer).parameters:
        if parameter is SLOPES and sloped:
            parameters[parameter.name] = torch.tensor(parameter.start(heads), device="cuda")
        elif parameter.required:
            spread = torch.linspace(0.8, 1.2, heads, device="cuda") * (parameter.initial or 1)
            parameters[parameter.name] = spread.requires_grad_(parameter.trainable)
    return parameters


def milliseconds(run: Callable[[], Any], repeat_ms: int) -> float:
    """Return the median time of ``run`` by CUDA events over ``repeat_ms``, after a warm-up of half
    as long."""
    return do_bench(run, warmup=repeat_ms // 2, rep=repeat_ms, return_mode="median")


def sparse_keys(query: Tensor, key: Tensor) -> Tensor:
    """Return ``key`` with signs changed so that one score in a hundred is positive."""
    scores = (query.float() * key.float()).sum(-1, keepdim=True)
    positive = torch.rand_like(scores) < 0.01
    return torch.where((scores > 0) == positive, key, -key)
