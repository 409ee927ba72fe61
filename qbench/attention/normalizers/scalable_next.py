"""The scalable variants as flash-linear-attention has them: s · log (n + 1), with n the keys that
the query may see; its table of logarithms begins at log 2 for the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import Kernels
from qbench.attention.normalizers.scalable import Scaled
from qbench.attention.normalizers.softmax import Softmax
from qbench.attention.normalizers.softpick import Softpick

if TYPE_CHECKING:
    from torch import Tensor


class ScaledNext(Scaled):
    def logarithms(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """log (n + 1) of each row."""
        if allowed is None:
            lengths = scores.new_tensor(float(scores.shape[-1]))
        else:
            lengths = allowed.sum(-1, keepdim=True).to(scores.dtype)
        return (lengths + 1).log()


class ScalableSoftmaxNext(ScaledNext):
    name = "scalable-softmax-next"
    description = "softmax of the scores times s log (n + 1), as flash-linear-attention has it"
    plain = Softmax()
    rows_sum_to_one = True
    sparse = False
    kernels = Kernels(
        family="softmax", backward=True, decode=True, gluon=True, scaled=True, one_more=True
    )


class ScalableSoftpickNext(ScaledNext):
    name = "scalable-softpick-next"
    description = "softpick of the scores times s log (n + 1), as flash-linear-attention has it"
    plain = Softpick()
    rows_sum_to_one = False
    sparse = True
    kernels = Kernels(
        family="softpick", backward=True, decode=True, gluon=True, scaled=True, one_more=True
    )
