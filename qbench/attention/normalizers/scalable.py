"""Scalable variants: scores are multiplied by s · log n first, with n the keys that the query may
see, each row its own, and s trained a head (Nakanishi 2025; the softpick paper's equation 8).

The variants ``-next`` have s · log (n + 1), as flash-linear-attention computes them: its table of
logarithms begins at log 2 for the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from qbench.attention.normalizers.normalizer import SLOPES, Normalizer, Parameter, log_lengths
from qbench.attention.normalizers.softmax import Softmax
from qbench.attention.normalizers.softpick import Softpick

if TYPE_CHECKING:
    from torch import Tensor

# 1 over the mean of log n for n up to 1,024: scores of such rows stay about what they are.
S = Parameter(name="s", trainable=True, attribute="s", initial=0.168)


class Scaled(Normalizer):
    """``plain`` of the scores times s · log n, or with ``one_more`` s · log (n + 1)."""

    plain: ClassVar[Normalizer]
    one_more: ClassVar[bool] = False
    parameters = (S, SLOPES)

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        s = parameters["s"].to(scores.dtype)[:, None, None]
        scale = s * log_lengths(scores, allowed, one_more=self.one_more)
        return self.plain.weights(scores * scale, allowed=allowed, parameters={})


class ScalableSoftmax(Scaled):
    name = "scalable-softmax"
    description = "softmax of the scores times s log n"
    plain = Softmax()
    rows_sum_to_one = True
    sparse = False
    kernels = replace(Softmax.kernels, scaled=True)


class ScalableSoftpick(Scaled):
    name = "scalable-softpick"
    description = "softpick of the scores times s log n (the paper's equation 8)"
    plain = Softpick()
    rows_sum_to_one = False
    sparse = True
    kernels = replace(Softpick.kernels, scaled=True)


class ScalableSoftmaxNext(ScalableSoftmax):
    name = "scalable-softmax-next"
    description = "softmax of the scores times s log (n + 1), as flash-linear-attention has it"
    one_more = True
    kernels = replace(ScalableSoftmax.kernels, one_more=True)


class ScalableSoftpickNext(ScalableSoftpick):
    name = "scalable-softpick-next"
    description = "softpick of the scores times s log (n + 1), as flash-linear-attention has it"
    one_more = True
    kernels = replace(ScalableSoftpick.kernels, one_more=True)
