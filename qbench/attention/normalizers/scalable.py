"""Scalable variants: scores are multiplied by s · log n first, with n the keys that the query may
see, each row its own, and s trained a head (Nakanishi 2025; the softpick paper's equation 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.lengths import log_lengths
from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer, Parameter
from qbench.attention.normalizers.softmax import Softmax
from qbench.attention.normalizers.softpick import Softpick

if TYPE_CHECKING:
    from torch import Tensor

# 1 over the mean of log n for n up to 1,024: scores of such rows stay about what they are.
S = Parameter(name="s", shape=("H",), trainable=True, attribute="s", initial=0.168)


def _scaled(scores: Tensor, allowed: Tensor | None, s: Tensor) -> Tensor:
    return scores * (s.to(scores.dtype)[:, None, None] * log_lengths(scores, allowed))


class ScalableSoftmax(Normalizer):
    name = "scalable-softmax"
    description = "softmax of the scores times s log n"
    rows_sum_to_one = True
    sparse = False
    parameters = (S, SLOPES)
    kernels = Kernels(family="softmax", backward=True, decode=True, gluon=True, scaled=True)

    def weights(
        self,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        assert parameters is not None, "checked() has refused it"
        return Softmax().weights(_scaled(scores, allowed, parameters["s"]), allowed=allowed)


class ScalableSoftpick(Normalizer):
    name = "scalable-softpick"
    description = "softpick of the scores times s log n (the paper's equation 8)"
    rows_sum_to_one = False
    sparse = True
    parameters = (S, SLOPES)
    kernels = Kernels(family="softpick", backward=True, decode=True, gluon=True, scaled=True)

    def weights(
        self,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        assert parameters is not None, "checked() has refused it"
        return Softpick().weights(_scaled(scores, allowed, parameters["s"]), allowed=allowed)
