"""How many keys each query may see: n of sigmoid's default bias and of the scalable variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def log_lengths(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """log n, in the dtype of ``scores`` [..., N], that broadcasts against them; 0 for n = 0."""
    if allowed is None:
        return scores.new_tensor(float(scores.shape[-1])).log()
    return allowed.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype).log()
