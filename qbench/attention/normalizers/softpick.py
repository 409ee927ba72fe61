"""Softpick, equation (1) of its paper, with m = max(0, max x):
w_i = ReLU(e^(x_i − m) − e^(−m)) / (Σ_k |e^(x_k − m) − e^(−m)| + ε).

Two choices make it safe for any finite score. m is at least 0, so neither e^(x − m) nor e^(−m)
overflows. And e^(x − m) − e^(−m) = −e^(max(x, 0) − m) · expm1(−|x|) · sign(x), exact near 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6  # what the paper's kernels train with
SAFE_MAXIMUM = 60.0  # e^60 · 1e10 is far from float32's largest number


class Softpick(Normalizer):
    name = "softpick"
    description = "rectified e^x − 1 divided by the sum of |e^x − 1| (the paper's equation 1)"
    rows_sum_to_one = False
    sparse = True
    parameters = (SLOPES,)
    kernels = Kernels(score_function="softpick")

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        if allowed is not None:  # e^0 − 1 = 0: a score of 0 adds nothing to either sum
            scores = scores.masked_fill(~allowed, 0.0)
        # The maximum as one of the scores: its gradient costs less than amax's.
        maximum = scores.gather(-1, scores.detach().argmax(-1, keepdim=True))
        maximum = maximum.where(maximum > 0, 0.0)
        shift = maximum.detach()  # it cancels in all terms but ε · e^m
        distance = (-scores.abs()).expm1() * (scores.clamp(min=0) - shift).exp()
        total = EPSILON * (maximum - shift).exp() - distance.sum(-1, keepdim=True)
        return (-distance).where(scores > 0, 0.0) / total

    def fraction(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator, of which only the quotient counts, in a third of the
        time of :meth:`weights`: scores up to SAFE_MAXIMUM need no new memory and one exponential
        each. Overwrites ``scores``."""
        if allowed is not None:
            scores.mul_(allowed)  # e^0 − 1 = 0: a score of 0 adds nothing to either sum
        maximum = scores.amax(-1, keepdim=True).clamp_(min=0)
        if maximum.max() <= SAFE_MAXIMUM:  # the shift by m is not needed: both times e^m
            numerator = scores.expm1_()
            both = numerator.sum(-1, keepdim=True)
            numerator.relu_()
            # Σ|a| = 2 Σ max(a, 0) − Σ a: two sums are thrice as fast as a norm, and nothing cancels
            total = numerator.sum(-1, keepdim=True).mul_(2).sub_(both)
            return numerator, total.add_(maximum.exp_().mul_(EPSILON))
        signs = scores.sign()
        distance = (scores.clamp(min=0) - maximum).exp_().mul_(scores.abs_().neg_().expm1_().neg_())
        total = distance.sum(-1, keepdim=True).add_(EPSILON)
        return distance.mul_(signs).relu_(), total
