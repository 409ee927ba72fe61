"""Scalable variants: scores are multiplied by s · log n first, with n the keys that the query may
see, each row its own, and s trained a head (Nakanishi 2025; the softpick paper's equation 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from qbench.attention.normalizers.lengths import log_lengths
from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer, Parameter
from qbench.attention.normalizers.softmax import Softmax
from qbench.attention.normalizers.softpick import Softpick

if TYPE_CHECKING:
    from torch import Tensor

# 1 over the mean of log n for n up to 1,024: scores of such rows stay about what they are.
S = Parameter(name="s", shape=("H",), trainable=True, attribute="s", initial=0.168)


class Scaled(Normalizer):
    """``plain`` of the scores times s · ``logarithms``."""

    plain: ClassVar[Normalizer]
    parameters = (S, SLOPES)

    def logarithms(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """log n of each row."""
        return log_lengths(scores, allowed)

    def weights(
        self,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        assert parameters is not None, "checked() has refused it"
        s = parameters["s"].to(scores.dtype)[:, None, None]
        return self.plain.weights(scores * (s * self.logarithms(scores, allowed)), allowed=allowed)


class ScalableSoftmax(Scaled):
    name = "scalable-softmax"
    description = "softmax of the scores times s log n"
    plain = Softmax()
    rows_sum_to_one = True
    sparse = False
    kernels = Kernels(family="softmax", backward=True, decode=True, gluon=True, scaled=True)


class ScalableSoftpick(Scaled):
    name = "scalable-softpick"
    description = "softpick of the scores times s log n (the paper's equation 8)"
    plain = Softpick()
    rows_sum_to_one = False
    sparse = True
    kernels = Kernels(family="softpick", backward=True, decode=True, gluon=True, scaled=True)
