"""The Triton kernels: forward, backward and decode of every normalizer that has a score function.

``torch.ops.qbench.attention`` is a custom operator with a fake implementation, so that
torch.compile takes it in one graph. Running it needs a CUDA device, or ``TRITON_INTERPRET=1`` in
the environment, which runs the kernels on the CPU. Importing this package needs neither torch
nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qbench.attention.normalizers import NORMALIZERS, SLOPES, Kernels
from qbench.errors import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

    from qbench.attention.kernels import ops


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
    and errors: see :func:`prepare`.
    """
    from qbench.attention.kernels import ops
    from qbench.attention.reference import autocast

    query, key, value = autocast(query, key, value)
    prepared = prepare(query, key, value, mask, **settings)
    return ops.apply(query, key, value, mask, spans, span_count, *prepared)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[ops.Parameters, ops.Settings]:
    """What the kernels take beside tensors, checked. ``max_seqlen_q`` and ``max_seqlen_k`` are the
    most query and key rows of one sequence, if known. Raises what ``reference.attention`` does,
    ValueError for float64, UnavailableError for a normalizer or a parameter that the kernels do not
    have."""
    from qbench.attention.kernels import formulas, ops
    from qbench.attention.reference import check

    check(query, key, value, mask)
    given = NORMALIZERS.get(normalizer).checked(parameters, query.shape[1])
    kernels = require(normalizer, given)
    if kernels.score_function not in formulas.SCORE_FUNCTIONS:
        raise UnavailableError(
            f"attention: the normalizer {normalizer!r} names the score function "
            f"{kernels.score_function!r}; there are {', '.join(formulas.SCORE_FUNCTIONS)}"
        )
    if query.dtype not in ops.DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "the kernels take bfloat16, float16 or float32, one for all, not "
            f"{query.dtype}, {key.dtype}, {value.dtype}; reference.attention takes float64"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"scale and softcap must be positive; they are {scale} and {softcap}")
    settings = ops.Settings(
        normalizer, scale, softcap or 0.0, causal, window or 0,
        max_seqlen_q or query.shape[2], max_seqlen_k or key.shape[2],
    )  # fmt: skip
    return ops.Parameters.of(given), settings
