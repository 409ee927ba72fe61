"""The families of formulas that the kernels are compiled with, as the host sees them; the formulas
are in :mod:`qbench.attention.kernels.family`. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qbench.attention.normalizers import NORMALIZERS, SLOPES, Kernels
from qbench.errors import UnavailableError

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


def computed() -> list[str]:
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
