"""Scalable variants: scores are first multiplied by s · log n, with n the keys that the query may
see and s trained per head (Nakanishi 2025; the softpick paper's equation 8).

The variants ``-next`` have s · log (n + 1), as flash-linear-attention computes them: its table of
logarithms begins at log 2 for the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Normalizer, Parameter, log_lengths
from qbench.attention.normalizers.softmax import Softmax
from qbench.attention.normalizers.softpick import Softpick

if TYPE_CHECKING:
    from torch import Tensor

# 1 over the mean of log n for n up to 1,024: scores of such rows stay about what they are.
S = Parameter(name="s", trainable=True, attribute="s", initial=0.168)


class Scalable(Normalizer):
    """The normalizer ``plain`` of scores times s · log n, or s · log (n + 1) if ``one_more``."""

    parameters = (S, SLOPES)

    def __init__(self, plain: Softmax | Softpick, *, one_more: bool = False) -> None:
        self.plain, self.one_more = plain, one_more
        self.name = f"scalable-{plain.name}" + ("-next" if one_more else "")
        scale = "s log (n + 1), as flash-linear-attention has it" if one_more else "s log n"
        self.description = f"{plain.name} of the scores times {scale}"
        self.rows_sum_to_one, self.sparse = plain.rows_sum_to_one, plain.sparse
        self.kernels = replace(plain.kernels, scaled=True, one_more=one_more)

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        s = parameters["s"].to(scores.dtype)[:, None, None]
        scale = s * log_lengths(scores, allowed, one_more=self.one_more)
        return self.plain.weights(scores * scale, allowed=allowed, parameters={})
