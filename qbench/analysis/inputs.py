"""Inputs of linear layers measured: outliers, and what a grid of few bits makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qbench.records import LinearInput

BITS = (8, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a linear layer receives: number of values, max |x|, and float64 sums [1 + 2 · len(BITS)]
    of x² and of (Q(x) − x)², with a scale a token and a scale a text, by bits. On the input's
    device; a sum of two is that of both together."""

    elements: int
    largest: Tensor
    sums: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, batch: Tensor) -> Inputs:
        """Of some texts, [B, T, D]."""
        wide = batch.float()
        tokens = wide.abs().amax(-1, keepdim=True)
        texts = tokens.amax(1, keepdim=True)
        sums = [wide.square().sum(-1).sum(dtype=torch.float64)]
        sums += [error(wide, peaks, bits) for peaks in (tokens, texts) for bits in BITS]
        return cls(elements=wide.numel(), largest=texts.max(), sums=torch.stack(sums))

    def __add__(self, other: Inputs) -> Inputs:
        return Inputs(
            elements=self.elements + other.elements,
            largest=torch.maximum(self.largest, other.largest),
            sums=self.sums + other.sums,
        )

    def summary(self, name: str) -> LinearInput:
        total, *wrong = self.sums.tolist()
        errors = [(one / total) ** 0.5 if total else 0.0 for one in wrong]
        bits = [str(one) for one in BITS]
        return LinearInput(
            name=name,
            largest=self.largest.item(),
            rms=(total / self.elements) ** 0.5,
            error_token=dict(zip(bits, errors[: len(bits)], strict=True)),
            error_text=dict(zip(bits, errors[len(bits) :], strict=True)),
        )


def error(values: Tensor, peaks: Tensor, bits: int) -> Tensor:
    """Σ (Q(x) − x)² over ``values`` [B, T, D] on the symmetric grid of ``bits`` bits whose end is
    ``peaks`` = max |x| [B, T or 1, 1]: Δ = max |x| / (2^(bits − 1) − 1), Q(x) = Δ · round(x / Δ).
    SmoothQuant, Xiao et al. 2023 (arXiv 2211.10438), equation 1. A scalar, float64."""
    step = peaks / (2 ** (bits - 1) - 1)
    steps = values / step.where(step > 0, 1.0)
    wrong = (steps.round().sub_(steps)).square_().sum(-1, keepdim=True)  # [B, T, 1], in Δ²
    return (wrong.double() * step.double().square()).sum()
