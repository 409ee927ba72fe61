"""Softmax, w_i = e^(x_i − m) / Σ_k e^(x_k − m) with m = max x, and its variants: over some keys
alone, and with one more term in the denominator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer, Parameter

if TYPE_CHECKING:
    from torch import Tensor


def softmax(scores: Tensor, allowed: Tensor | None, sink: Tensor | None = None) -> Tensor:
    """Return the weights of ``scores`` [..., N] over the ``allowed`` keys (None: all); zeros in a
    row without any. ``sink``, broadcast to [..., 1]: one more score in the sum."""
    import torch

    visible = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
    # The maximum only shifts the exponents: function and gradient do not depend on it.
    maximum = visible.detach().amax(-1, keepdim=True)
    # A finite shift keeps rows without any key free of −∞ − (−∞).
    lowest = torch.finfo(scores.dtype).min
    maximum = maximum.clamp(min=lowest) if sink is None else maximum.maximum(sink.detach())
    exponentials = (visible - maximum).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - maximum).exp()
    # A row without keys gives 0 / 1. No clamp: at its bound, which a row with all of its weight on
    # one key sits at, torch's versions disagree about the gradient.
    return exponentials / total.where(total > 0, 1.0)


class Softmax(Normalizer):
    name = "softmax"
    description = "exponentials divided by their sum"
    rows_sum_to_one = True
    sparse = False
    parameters = (SLOPES,)
    kernels = Kernels(score_function="softmax")

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        return softmax(scores, allowed)

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
        """Return torch's own softmax attention, computed in float32 and returned in the query's
        dtype, which stores no scores; 0 where a query sees no key. None for float64, and without a
        mask for causal queries (more than one) of another number than keys: torch aligns the first
        query with the first key, not the last with the last."""
        import torch

        queries, keys = query.shape[2], key.shape[2]
        causal = causal and queries > 1  # the last query sees every key
        if query.dtype == torch.float64 or (causal and mask is None and queries != keys):
            return None
        if causal and mask is not None:
            mask = mask & mask.new_ones(queries, keys).tril(keys - queries)
            causal = False
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


class Rectified(Normalizer):
    """w_i = [x_i ≥ 0] e^(x_i − m) / Σ_k [x_k ≥ 0] e^(x_k − m), the softpick paper's appendix B."""

    name = "rectified"
    description = "softmax over the scores that are not negative (the paper's appendix B)"
    rows_sum_to_one = False
    sparse = True
    parameters = (SLOPES,)
    kernels = Kernels(score_function="rectified")

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        kept = scores >= 0
        return softmax(scores, kept if allowed is None else kept & allowed)


class Softmax1(Normalizer):
    """w_i = e^(x_i − m) / (e^(s − m) + Σ_k e^(x_k − m)), m = max(s, max x), so that a query may
    attend to nothing: s is 0 ("off by one", Miller 2023), or the parameter ``sinks``."""

    name = "softmax1"
    description = "softmax with 1 added to the denominator"
    rows_sum_to_one = False
    sparse = False
    parameters = (SLOPES,)
    kernels = Kernels(score_function="softmax", sink=True)

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        sink = scores.new_zeros(())
        if "sinks" in parameters:
            sink = parameters["sinks"].to(scores.dtype)[:, None, None]
        return softmax(scores, allowed, sink)


class SoftmaxSink(Softmax1):
    """Softmax with a learned sink s per head (gpt-oss)."""

    name = "softmax-sink"
    description = "softmax with e to a learned sink per head added to the denominator"
    parameters = (
        Parameter(name="sinks", trainable=True, attribute="sinks", keyword="s_aux"),
        SLOPES,
    )
