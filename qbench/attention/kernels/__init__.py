"""The Triton kernels: forward, backward and decode for every normalizer that has a score function.

``torch.ops.qbench.attention`` is a custom operator with a fake implementation, so that
torch.compile keeps it in one graph. Running it needs a CUDA device, or ``TRITON_INTERPRET=1`` in
the environment, which runs the kernels on the CPU. Imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qbench.attention.normalizers import NORMALIZERS, Kernels
from qbench.errors import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor


def supported() -> list[str]:
    """Return the names of the normalizers that have kernels, in the order of registration."""
    return [name for name, normalizer in NORMALIZERS.items() if normalizer.kernels]


def require(normalizer: str) -> Kernels:
    """Return the kernels of ``normalizer``. Raises UnavailableError if it has none, RecipeError for
    an unknown name."""
    kernels = NORMALIZERS[normalizer].kernels
    if kernels is None:
        raise UnavailableError(
            f"attention: there are no kernels for the normalizer {normalizer!r}; use 'reference'"
        )
    return kernels


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    seq_bounds: Tensor | None = None,
    seq_count: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Compute attention by the kernels; arguments, result and errors as of ``reference.attention``.

    ``seq_bounds`` (int32 [S, 6], see :mod:`qbench.attention.kernels.varlen`) limits it to sequences
    inside the batch rows; rows outside them give 0. ``seq_count``: how many of them count, as
    ``sequence_bounds`` returns it; ``mask`` is used if bounds cannot describe the sequences. Other
    ``settings`` and errors: see :func:`qbench.attention.kernels.ops.prepare`.
    """
    from qbench.attention.kernels import ops
    from qbench.attention.reference import autocast

    query, key, value = autocast(query, key, value)
    apart = seq_bounds if seq_count is None else None  # from the mask
    prepared = ops.prepare(query, key, value, mask, apart, **settings)
    return ops.apply(query, key, value, mask, seq_bounds, seq_count, *prepared)
