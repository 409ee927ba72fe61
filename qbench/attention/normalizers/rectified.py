"""Softmax over the scores that are not negative (the softpick paper's appendix B,
"rectified-only"): w_i = [x_i ≥ 0] e^(x_i − m) / Σ_k [x_k ≥ 0] e^(x_k − m), m = max(0, max x)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer

if TYPE_CHECKING:
    from torch import Tensor


class Rectified(Normalizer):
    name = "rectified"
    description = "softmax over the scores that are not negative (the paper's appendix B)"
    rows_sum_to_one = False
    sparse = True
    parameters = (SLOPES,)
    kernels = Kernels(score_function="rectified")

    def weights(
        self,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        visible = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
        # The maximum only shifts the exponents: function and gradient do not depend on it.
        maximum = visible.detach().amax(-1, keepdim=True).clamp(min=0)
        kept = scores.masked_fill(~(visible >= 0), float("-inf"))
        exponentials = (kept - maximum).exp()
        # The largest exponential of a row with any is 1, so this clamp only makes 0 / 0 zero.
        return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1)
