"""Softmax: w_i = e^(x_i − m) / Σ_k e^(x_k − m), m = max x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer

if TYPE_CHECKING:
    from torch import Tensor


class Softmax(Normalizer):
    name = "softmax"
    description = "exponentials divided by their sum"
    rows_sum_to_one = True
    sparse = False
    parameters = (SLOPES,)
    kernels = Kernels(score_function="softmax")

    def weights(
        self,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        distances: Tensor | None = None,
    ) -> Tensor:
        import torch

        visible = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
        # The maximum only shifts the exponents: function and gradient do not depend on it.
        maximum = visible.detach().amax(-1, keepdim=True)
        # A finite shift keeps rows without any key free of −∞ − (−∞).
        exponentials = (visible - maximum.clamp(min=torch.finfo(scores.dtype).min)).exp()
        # The largest exponential of a row with any is 1, so this clamp only makes 0 / 0 zero.
        return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor | None:
        """Torch's own softmax attention in float32: the same function, without storing the
        scores. It aligns the first query with the first key where it is causal."""
        import torch

        queries, keys = query.shape[2], key.shape[2]
        causal = causal and queries > 1  # the last query sees every key
        if query.dtype == torch.float64 or (causal and (queries != keys or mask is not None)):
            return None
        output = torch.nn.functional.scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        if mask is not None:
            # Torch averages all values, or gives NaN, where a query has nothing to attend to.
            output = output.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return output.to(query.dtype)
