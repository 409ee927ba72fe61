"""Queries and keys in another basis, for a KV cache of few bits: their products stay what they
were, and what a cache rounds has no channel that outgrows the others.

A treated model's attention modules carry the rotation; it is applied before keys are rounded, and
once, whoever attends first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

ROTATION = "qbench_rotation"  # attribute: a callable on [..., D] that keeps inner products
ROTATED = "qbench_rotated"  # option of attention functions: queries and keys are rotated already


def rotated(
    module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``query`` and ``key`` as ``module`` attends with them; ``options`` remember it."""
    rotation = getattr(module, ROTATION, None)
    if rotation is None or options.get(ROTATED):
        return query, key
    options[ROTATED] = True
    return rotation(query), rotation(key)
