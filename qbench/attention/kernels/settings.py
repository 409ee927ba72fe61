"""What a call of the kernels is for, as launches, operator and autograd hand it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from qbench.attention.kernels import FAMILIES, modes
from qbench.attention.kernels.family import LOG2_E
from qbench.attention.normalizers import Kernels

if TYPE_CHECKING:
    from torch import Tensor


class Settings(NamedTuple):
    """``softcap`` and ``window``: 0 for none. ``max_seqlen_q`` and ``max_seqlen_k``: the most query
    and key rows of one sequence."""

    normalizer: str
    scale: float
    softcap: float
    causal: bool
    window: int
    max_seqlen_q: int
    max_seqlen_k: int


class Parameters(NamedTuple):
    """Float32 [heads] each, or None where the normalizer has none."""

    sinks: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    s: Tensor | None = None

    @classmethod
    def of(cls, given: Mapping[str, Tensor]) -> Parameters:
        return cls(**{name: tensor.float().contiguous() for name, tensor in given.items()})


NONE = Parameters()


def kernel_modes(
    kernels: Kernels,
    parameters: Parameters,
    softcap: float,
    learning: bool = False,
    sloping: bool = False,
) -> int:
    """Bits of :mod:`qbench.attention.kernels.modes`. ``learning``: the gradient of bias, sinks or s
    is wanted; ``sloping``: that of the slopes."""
    bits = FAMILIES[kernels.family].modes
    if kernels.scaled:
        bits |= modes.SCALED.value | (modes.NEXT.value if kernels.one_more else 0)
    if softcap:
        bits |= modes.CAPPED.value
    if parameters.slopes is not None:
        bits |= modes.SLOPED.value
    if kernels.sink:
        bits |= {"one": modes.SINK_ONE, "learned": modes.SINK_LEARNED}[kernels.sink].value
    if learning:
        bits |= modes.LEARNING.value
    if sloping:
        bits |= modes.LEARNING_SLOPES.value
    return bits


def factors(scale: float, softcap: float) -> tuple[float, float]:
    """What makes scores in log2 units of products, or of their tanh where they are capped; and what
    products are multiplied by before the tanh."""
    return (softcap * LOG2_E, scale / softcap) if softcap else (scale * LOG2_E, 0.0)
