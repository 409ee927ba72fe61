"""The scalable variants as flash-linear-attention has them: s · log (n + 1), with n the keys that
the query may see; its table of logarithms begins at log 2 for the first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Normalizer
from qbench.attention.normalizers.scalable import S
from qbench.attention.normalizers.softmax import Softmax
from qbench.attention.normalizers.softpick import Softpick

if TYPE_CHECKING:
    from torch import Tensor


def _scaled(scores: Tensor, allowed: Tensor | None, s: Tensor) -> Tensor:
    if allowed is None:
        lengths = scores.new_tensor(float(scores.shape[-1]))
    else:
        lengths = allowed.sum(-1, keepdim=True).to(scores.dtype)
    return scores * (s.to(scores.dtype)[:, None, None] * (lengths + 1).log())


class ScalableSoftmaxNext(Normalizer):
    name = "scalable-softmax-next"
    description = "softmax of the scores times s log (n + 1), as flash-linear-attention has it"
    rows_sum_to_one = True
    sparse = False
    parameters = (S, SLOPES)

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


class ScalableSoftpickNext(Normalizer):
    name = "scalable-softpick-next"
    description = "softpick of the scores times s log (n + 1), as flash-linear-attention has it"
    rows_sum_to_one = False
    sparse = True
    parameters = (S, SLOPES)

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
