"""Hidden states measured: kurtosis by three definitions, extremes, massive activations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qbench.record.analysis import Hidden

MASSIVE_VALUE = 100.0  # Sun et al. 2024, section 2
MASSIVE_TO_MEDIAN = 1000.0
MASSIVE_KEPT = 100  # listed in a record; all are counted
BONDARENKO_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Massive activations: ``indices`` int64 [M, 3] of sample, position, channel."""

    layer: int
    indices: Tensor
    values: Tensor
    to_median: Tensor


@dataclass(kw_only=True, eq=False)
class States:
    """What is kept of one layer's hidden states, a row a text; float64 on the CPU.

    ``powers`` [N, 4]: Σ x, Σ x², Σ x³, Σ x⁴ over the T · D values of each text.
    """

    values: int = 0  # of one text
    powers: list[Tensor] = field(default_factory=list)
    token_kurtosis: list[Tensor] = field(default_factory=list)
    lowest: list[Tensor] = field(default_factory=list)
    highest: list[Tensor] = field(default_factory=list)
    medians: list[Tensor] = field(default_factory=list)
    massive: int = 0

    @torch.no_grad()
    def add(self, states: Tensor, *, layer: int, first: int) -> Found | None:
        """Take in hidden states [B, T, D] of texts ``first``, ``first`` + 1, …; returns the
        massive activations among them.

        Sun et al. 2024 (arXiv 2402.17762, section 2): a value is massive where its magnitude
        "surpasses 100 and is at least or around 1,000 times larger than the median magnitude of
        its hidden state". That is taken as exactly 1,000 times or more, the hidden state as that
        of one layer and text [T, D].
        """
        wide = states.double()
        flat = wide.flatten(1)
        self.values = flat.shape[1]
        squares = flat.square()
        self.powers.append(
            torch.stack(
                [flat.sum(1), squares.sum(1), (squares * flat).sum(1), squares.square().sum(1)], 1
            ).cpu()
        )
        self.token_kurtosis.append(token_kurtosis(wide).mean(1).cpu())
        magnitudes = states.float().abs()
        medians = magnitudes.flatten(1).median(1).values
        self.lowest.append(flat.amin(1).cpu())
        self.highest.append(flat.amax(1).cpu())
        self.medians.append(medians.double().cpu())
        limits = (medians * MASSIVE_TO_MEDIAN)[:, None, None]
        indices = ((magnitudes > MASSIVE_VALUE) & (magnitudes >= limits)).nonzero()
        self.massive += len(indices)
        if not len(indices):
            return None
        found = magnitudes[indices.unbind(1)]
        kept = found.topk(min(len(indices), MASSIVE_KEPT)).indices
        indices = indices[kept]
        values = states[indices.unbind(1)].double().cpu()
        ratios = (found[kept] / medians[indices[:, 0]]).double().cpu()
        indices[:, 0] += first
        return Found(layer=layer, indices=indices.cpu(), values=values, to_median=ratios)


def pooled_kurtosis(powers: Tensor, values: int) -> float:
    """μ4 / σ⁴ of all values at once, not excess: 3 for a normal distribution.

    ``powers`` [N, 4] as in :class:`States`, each row over ``values`` values. The softpick paper
    (section 6.3, table 4) collects "all hidden state vectors to evaluate them all at once": the
    outputs of every decoder layer, before the final norm. It does not say whether 3 is taken
    off; at its size of thousands that does not matter. NaN where all values are equal.
    """
    fourth, variance = (moment.item() for moment in _central(powers.sum(0), values * len(powers)))
    return fourth / variance**2 if variance > 0 else float("nan")


def sequence_kurtosis(powers: Tensor, values: int) -> Tensor:
    """Bondarenko et al. 2023 (arXiv 2306.12929, section 5 and their code): μ4 / (s⁴ + 1e-6) of
    each flattened text, s with n − 1 below the line; to be averaged over texts and modules.

    They measure the outputs of attention and feed-forward layers; here the modules are decoder
    layers, so that the three definitions speak of the same tensors. ``powers`` as in
    :class:`States`. Returns [N].
    """
    fourth, variance = _central(powers, values)
    unbiased = variance * values / max(1, values - 1)
    return fourth / (unbiased.square() + BONDARENKO_EPSILON)


def token_kurtosis(states: Tensor) -> Tensor:
    """OSP, Park et al. 2025 (arXiv 2506.19697): excess kurtosis of each token's vector, without
    taking off its mean: max(0, E[x⁴] / E[x²]² − 3); to be averaged over tokens and layers.
    ``states`` [..., D], float64. Returns [...]."""
    squares = states.square()
    spread = squares.mean(-1).square()
    ratio = squares.square().mean(-1) / spread
    return torch.where(spread > 0, (ratio - 3).clamp(min=0), 0.0)


def _central(powers: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """Fourth central moment and variance (n below the line) from power sums [..., 4].

    In float64 nothing is lost: means of hidden states are small beside their spread.
    """
    one, two, three, four = (powers / values).unbind(-1)
    fourth = four - 4 * one * three + 6 * one**2 * two - 3 * one**4
    return fourth, two - one**2


def summary(layers: list[States]) -> Hidden:
    """Of one layer's hidden states, or of those of several taken together."""
    powers = torch.cat([tensor for one in layers for tensor in one.powers])
    values = layers[0].values
    lowest, highest, medians, tokens = (
        torch.cat([tensor for one in layers for tensor in getattr(one, name)])
        for name in ("lowest", "highest", "medians", "token_kurtosis")
    )
    largest = torch.maximum(lowest.abs(), highest.abs())
    return Hidden(
        kurtosis=pooled_kurtosis(powers, values),
        kurtosis_sequence=sequence_kurtosis(powers, values).mean().item(),
        kurtosis_token=tokens.mean().item(),
        minimum=lowest.min().item(),
        maximum=highest.max().item(),
        median=medians.median().item(),
        largest_to_median=(largest / medians).max().item(),
        massive=sum(one.massive for one in layers),
    )
