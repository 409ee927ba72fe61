"""The Triton kernels: forward, backward and decode of every normalizer that has a score function.

``torch.ops.qbench.attention`` is a custom operator with a fake implementation, so that
torch.compile takes it in one graph. Running it needs a CUDA device, or ``TRITON_INTERPRET=1`` in
the environment, which runs the kernels on the CPU. Importing this package needs neither torch
nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qbench.attention.normalizers import NORMALIZERS, SLOPES, Kernels
from qbench.errors import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

SCORE_FUNCTIONS = ("softmax", "softpick", "rectified", "sigmoid")  # that formulas.py has


def taken(kernels: Kernels) -> tuple[str, ...]:
    """The parameters that these kernels take."""
    names: tuple[str, ...] = (SLOPES.name,)
    if kernels.elementwise:
        names += ("bias",)
    if kernels.sink == "learned":
        names += ("sinks",)
    return (*names, "s") if kernels.scaled else names


def lack(normalizer: str) -> str | None:
    """What the kernels lack for this normalizer, or None. Raises RecipeError for an unknown one."""
    chosen = NORMALIZERS.get(normalizer)
    if chosen.kernels is None:
        return f"there are no kernels for the normalizer {normalizer!r}"
    if chosen.kernels.score_function not in SCORE_FUNCTIONS:
        return (
            f"the normalizer {normalizer!r} names the score function "
            f"{chosen.kernels.score_function!r}; there are {', '.join(SCORE_FUNCTIONS)}"
        )
    if chosen.kernels.sink and chosen.kernels.score_function != "softmax":
        return f"the kernels of {normalizer!r} have no sink but with the score function 'softmax'"
    if chosen.kernels.scaled and chosen.kernels.elementwise:
        return f"the kernels of {normalizer!r} cannot be both scaled and elementwise"
    for parameter in chosen.parameters:
        if parameter.required and parameter.name not in taken(chosen.kernels):
            return f"the kernels of {normalizer!r} do not take its parameter {parameter.name!r}"
    return None


def supported() -> list[str]:
    """The normalizers that the kernels compute, as they were registered."""
    return [name for name in NORMALIZERS if lack(name) is None]


def require(normalizer: str, parameters: Iterable[str] = ()) -> Kernels:
    """The kernels of this normalizer. Raises UnavailableError where they lack it or one of the
    ``parameters`` that are given; RecipeError for an unknown normalizer."""
    problem = lack(normalizer)
    if problem:
        raise UnavailableError(f"attention: {problem}; use 'reference'")
    kernels = NORMALIZERS.get(normalizer).kernels
    assert kernels is not None, "lack() has refused it"
    for name in parameters:
        if name not in taken(kernels):
            raise UnavailableError(
                f"attention: the kernels of {normalizer!r} do not take its parameter {name!r}; "
                "use 'reference'"
            )
    return kernels


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    spans: Tensor | None = None,
    span_count: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Attention by the kernels; arguments, result and errors as ``reference.attention``.

    ``spans`` (int32 [S, 6], see :mod:`qbench.attention.kernels.varlen`) limits it to sequences
    inside the batch rows; rows outside them give 0. With ``span_count``, as ``sequence_spans``
    gives it, so many of them; ``mask`` is then for where spans cannot say it. Other ``settings``
    and errors: see :func:`qbench.attention.kernels.ops.prepare`.
    """
    from qbench.attention.kernels import ops
    from qbench.attention.reference import autocast

    query, key, value = autocast(query, key, value)
    prepared = ops.prepare(query, key, value, mask, **settings)
    return ops.apply(query, key, value, mask, spans, span_count, *prepared)
