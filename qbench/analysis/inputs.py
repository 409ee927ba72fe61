"""Inputs of linear layers measured: outliers, and what a grid of few bits makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qbench.records import LinearInput

BITS = (8, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """One look at an input: number of values, max |x|, and float64 sums [1 + 2 · len(BITS)] of x²
    and of (Q(x) − x)², with a scale a token and a scale a text, by bits. On the input's device."""

    elements: int
    largest: Tensor
    sums: Tensor


@torch.no_grad()
def look(batch: Tensor) -> Look:
    """At what a linear layer receives of some texts, [B, T, D]."""
    wide = batch.float()
    tokens = wide.abs().amax(-1, keepdim=True)
    texts = tokens.amax(1, keepdim=True)
    sums = [wide.square().sum(-1).sum(dtype=torch.float64)]
    sums += [error(wide, peaks, bits) for peaks in (tokens, texts) for bits in BITS]
    return Look(elements=wide.numel(), largest=texts.max(), sums=torch.stack(sums))


@dataclass(kw_only=True, eq=False)
class Inputs:
    """All looks at what one linear layer receives, added up."""

    elements: int = 0
    largest: Tensor | None = None
    sums: Tensor | None = None

    def add(self, one: Look) -> None:
        self.elements += one.elements
        if self.largest is None or self.sums is None:
            self.largest, self.sums = one.largest, one.sums
        else:
            self.largest, self.sums = torch.maximum(self.largest, one.largest), self.sums + one.sums

    def summary(self, name: str) -> LinearInput:
        assert self.largest is not None
        assert self.sums is not None
        total, *wrong = self.sums.tolist()
        errors = [(one / total) ** 0.5 if total else 0.0 for one in wrong]
        return LinearInput(
            name=name,
            largest=self.largest.item(),
            rms=(total / self.elements) ** 0.5,
            error_token={str(bits): error for bits, error in zip(BITS, errors, strict=False)},
            error_text={
                str(bits): error for bits, error in zip(BITS, errors[len(BITS) :], strict=True)
            },
        )


def error(values: Tensor, peaks: Tensor, bits: int) -> Tensor:
    """Σ (Q(x) − x)² over ``values`` [B, T, D] on the symmetric grid of ``bits`` bits whose end is
    ``peaks`` = max |x| [B, T or 1, 1]: Δ = max |x| / (2^(bits − 1) − 1), Q(x) = Δ · round(x / Δ).
    SmoothQuant, Xiao et al. 2023 (arXiv 2211.10438), equation 1. A scalar, float64."""
    step = peaks / (2 ** (bits - 1) - 1)
    steps = values / step.where(step > 0, 1.0)
    wrong = (steps.round().sub_(steps)).square_().sum(-1, keepdim=True)  # [B, T, 1], in Δ²
    return (wrong.double() * step.double().square()).sum()
