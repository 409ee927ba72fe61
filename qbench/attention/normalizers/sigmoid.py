"""Sigmoid attention, equation (2) of its paper: w_i = σ(x_i + b) = 1 / (1 + e^(−x_i − b)).

Each weight depends on its own score alone. The bias b is −log n by default, with n the keys that
the query may see (Ramapuram et al. 2024: the weights of a row of small scores then sum to about 1).
The parameter ``bias`` replaces it, one number per head, trained or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import (
    SLOPES,
    Kernels,
    Normalizer,
    Parameter,
    log_lengths,
)

if TYPE_CHECKING:
    from torch import Tensor


class Sigmoid(Normalizer):
    name = "sigmoid"
    description = "the sigmoid of each score plus a bias, −log n by default"
    rows_sum_to_one = False
    sparse = False
    parameters = (
        Parameter(
            name="bias",
            trainable=True,
            attribute="sigmoid_bias",
            required=False,
            initial=-7.5,  # −log n for 2,048 keys
        ),
        SLOPES,
    )
    kernels = Kernels(score_function="sigmoid")

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        if "bias" in parameters:
            bias = parameters["bias"].to(scores.dtype)[:, None, None]
        else:
            bias = -log_lengths(scores, allowed)
        weights = (scores + bias).sigmoid()
        return weights if allowed is None else weights.masked_fill(~allowed, 0.0)
