"""Softmax with one more term in the denominator, so that a query may attend to nothing:
w_i = e^(x_i − m) / (e^(s − m) + Σ_k e^(x_k − m)), m = max(s, max x).

``softmax1`` has s = 0 ("off by one", Miller 2023); ``softmax-sink`` learns an s a head (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Normalizer, Parameter
from qbench.attention.normalizers.softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor


class Sunk(Normalizer):
    """s is the parameter ``sinks``, or 0 without it."""

    rows_sum_to_one = False
    sparse = False
    parameters = (SLOPES,)

    def weights(
        self,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        sink = scores.new_zeros(())
        if parameters and "sinks" in parameters:
            sink = parameters["sinks"].to(scores.dtype)[:, None, None]
        visible = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
        # The maximum only shifts the exponents: function and gradient do not depend on it.
        maximum = visible.amax(-1, keepdim=True).maximum(sink).detach()
        exponentials = (visible - maximum).exp()
        return exponentials / (exponentials.sum(-1, keepdim=True) + (sink - maximum).exp())


class Softmax1(Sunk):
    name = "softmax1"
    description = "softmax with 1 added to the denominator"
    kernels = replace(Softmax.kernels, sink="one")


class SoftmaxSink(Sunk):
    name = "softmax-sink"
    description = "softmax with e to a learned sink a head added to the denominator"
    parameters = (
        Parameter(
            name="sinks", shape=("H",), trainable=True, attribute="sinks", keyword="s_aux"
        ),
        SLOPES,
    )  # fmt: skip
    kernels = replace(Softmax.kernels, sink="learned")
