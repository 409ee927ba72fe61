"""A normalizer from outside the package, in one file: importing it registers it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers import Normalizer, register

if TYPE_CHECKING:
    from torch import Tensor


class Toy(Normalizer):
    """w_i = max(x_i, 0) / (Σ_k max(x_k, 0) + 1)."""

    name = "toy"
    description = "positive scores divided by their sum plus one"
    rows_sum_to_one = False
    sparse = True

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        positive = scores.relu()
        if allowed is not None:
            positive = positive.masked_fill(~allowed, 0.0)
        return positive / (positive.sum(-1, keepdim=True) + 1)


register(Toy())
