"""Inputs of linear layers measured: outliers, and what a grid of few bits makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qbench.record.analysis import LinearInput

BITS = (8, 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """One look at an input: number of values, max |x|, Σ x², and Σ (Q(x) − x)² by the number of
    values that share a scale and the grid's bits. Scalars on the input's device."""

    elements: int
    largest: Tensor
    squares: Tensor
    errors: dict[tuple[str, int], Tensor]


@torch.no_grad()
def look(batch: Tensor) -> Look:
    """At what a linear layer receives of some texts, [B, T, D]. Sums are float64."""
    wide = batch.float()
    tokens = wide.abs().amax(-1, keepdim=True)
    texts = tokens.amax(1, keepdim=True)
    return Look(
        elements=wide.numel(),
        largest=texts.max(),
        squares=wide.square().sum(dtype=torch.float64),
        errors={
            (kind, bits): (on_grid(wide, peaks, bits) - wide).square().sum(dtype=torch.float64)
            for kind, peaks in (("token", tokens), ("text", texts))
            for bits in BITS
        },
    )


@dataclass(kw_only=True, eq=False)
class Inputs:
    """All looks at what one linear layer receives."""

    looks: list[Look] = field(default_factory=list)

    def summary(self, name: str) -> LinearInput:
        total = sum(one.squares.item() for one in self.looks)

        def errors(kind: str) -> dict[str, float]:
            sums = {bits: sum(one.errors[kind, bits].item() for one in self.looks) for bits in BITS}
            return {str(bits): (sums[bits] / total) ** 0.5 if total else 0.0 for bits in BITS}

        return LinearInput(
            name=name,
            largest=max(one.largest.item() for one in self.looks),
            rms=(total / sum(one.elements for one in self.looks)) ** 0.5,
            error_token=errors("token"),
            error_text=errors("text"),
        )


def on_grid(values: Tensor, peaks: Tensor, bits: int) -> Tensor:
    """``values`` rounded to the symmetric grid of ``bits`` bits whose end is ``peaks`` = max |x|:
    Δ = max |x| / (2^(bits − 1) − 1), Q(x) = Δ · round(x / Δ). SmoothQuant, Xiao et al. 2023
    (arXiv 2211.10438), equation 1. Where ``peaks`` is 0, so is the result."""
    step = peaks / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (values / step).round() * step, 0.0)
