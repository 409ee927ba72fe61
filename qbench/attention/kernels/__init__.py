"""The Triton kernels: forward, backward and decode of every normalizer that has a score function.

``torch.ops.qbench.attention`` is a custom operator with a fake implementation, so that
torch.compile takes it in one graph. Running it needs a CUDA device, or ``TRITON_INTERPRET=1`` in
the environment, which runs the kernels on the CPU. Importing this package needs neither torch
nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.attention.normalizers import NORMALIZERS, SLOPES, Kernels
from qbench.errors import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

SIGMOID = 8 | 16  # BIASED and SUMLESS of modes.py, which imports Triton


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """``few_registers``: a score costs so little that taller query tiles fit, see ``tiles.py``.
    ``near_zero``: scores near 0 lose bits in the fast formulas, so the forward pass says where,
    and the backward pass has a second, precise form. ``modes``: of :mod:`modes`, what it always
    does. ``sinks``: whether a sink may stand in its denominator. ``parameters``: tensors beside the
    scores that it takes, as the slopes that all take."""

    few_registers: bool = False
    near_zero: bool = False
    modes: int = 0
    sinks: bool = False
    parameters: tuple[str, ...] = ()


FAMILIES = {
    "softmax": Family(few_registers=True, sinks=True),
    "softpick": Family(near_zero=True),
    "rectified": Family(),
    "sigmoid": Family(few_registers=True, modes=SIGMOID, parameters=("bias",)),
}


def taken(kernels: Kernels) -> tuple[str, ...]:
    """The parameters that these kernels take."""
    names = (SLOPES.name, *FAMILIES[kernels.family].parameters)
    if kernels.sink == "learned":
        names += ("sinks",)
    return (*names, "s") if kernels.scaled else names


def lack(normalizer: str) -> str | None:
    """What the kernels lack for this normalizer, or None. Raises RecipeError for an unknown one."""
    chosen = NORMALIZERS.get(normalizer)
    if chosen.kernels is None:
        return f"there are no kernels for the normalizer {normalizer!r}"
    if chosen.kernels.family not in FAMILIES:
        return (
            f"the normalizer {normalizer!r} names the kernel family {chosen.kernels.family!r}, "
            f"which is not there; there are {', '.join(FAMILIES)}"
        )
    if chosen.kernels.sink and not FAMILIES[chosen.kernels.family].sinks:
        return f"the kernels of {normalizer!r} have no sink in the family {chosen.kernels.family!r}"
    for parameter in chosen.parameters:
        if parameter.required and parameter.name not in taken(chosen.kernels):
            return f"the kernels of {normalizer!r} do not take its parameter {parameter.name!r}"
    return None


def supported() -> list[str]:
    """The normalizers that the kernels compute, as they were registered."""
    return [name for name in NORMALIZERS if lack(name) is None]


def require(normalizer: str, parameters: Iterable[str] = (), *, gradients: bool = False) -> Kernels:
    """The kernels of this normalizer. Raises UnavailableError where they lack it, one of the
    ``parameters`` that are given, or ``gradients``; RecipeError for an unknown normalizer."""
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
    if gradients and not kernels.backward:
        raise UnavailableError(
            f"attention: the kernels of {normalizer!r} have no backward pass; use 'reference'"
        )
    return kernels


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    spans: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """Attention by the kernels; arguments, result and errors as ``reference.attention``.

    ``spans`` (int32 [S, 6], see :mod:`qbench.attention.kernels.spans`) limits it to sequences
    inside the batch rows; rows outside them give 0. ``max_seqlen_q`` and
    ``max_seqlen_k`` are the most query and key rows of one sequence, if known. Raises ValueError
    for float64, UnavailableError for a normalizer or a parameter that the kernels do not have.
    """
    import torch

    from qbench.attention.kernels import operator, plans

    described = None
    if mask is None and spans is None:
        about = (normalizer, scale, softcap, causal, window, max_seqlen_q, max_seqlen_k)
        described = plans.described(query, key, value, parameters, about)
        plan = described and plans.known(described, normalizer)
        if plan:
            return operator.again(query, key, value, parameters or {}, plan)

    from qbench.attention.kernels.settings import Parameters, Settings
    from qbench.attention.reference import autocast, check

    query, key, value = autocast(query, key, value)
    check(query, key, value, mask)
    given = NORMALIZERS.get(normalizer).checked(parameters, query.shape[1])
    learning = torch.is_grad_enabled() and any(
        t.requires_grad for t in (query, key, value, *given.values())
    )
    require(normalizer, given, gradients=learning)
    for tensor in (query, key, value):
        if tensor.dtype not in operator.DTYPES or tensor.dtype != query.dtype:
            raise ValueError(
                f"the kernels take bfloat16, float16 or float32, one for all, not {tensor.dtype}; "
                "reference.attention takes float64"
            )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and number <= 0:
            raise ValueError(f"{name} must be positive; it is {number}")
    settings = Settings(
        normalizer, scale, softcap or 0.0, causal, window or 0,
        max_seqlen_q or query.shape[2], max_seqlen_k or key.shape[2],
    )  # fmt: skip
    if described:
        plans.remember(described, normalizer, settings)
    return operator.apply(query, key, value, mask, spans, Parameters.of(given), settings)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """Sequences laid in a row in [1, H, T, D]; arguments as ``reference.packed_attention``."""
    from qbench.attention.kernels.spans import packed_spans

    return attention(
        query, key, value, normalizer=normalizer, parameters=parameters, scale=scale,
        softcap=softcap, causal=causal, window=window,
        spans=packed_spans(cu_seqlens_q, cu_seqlens_k), max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
