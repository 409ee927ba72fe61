"""Normalizers, the functions that turn scores into attention weights, one per file. Imports no
torch.

A new one is a file with a subclass of :class:`Normalizer` and a call of :func:`register`: in this
module for one that comes with qbench, in its own file for a plug-in.
"""

from __future__ import annotations

from qbench.attention.normalizers.normalizer import SLOPES, Kernels, Normalizer, Parameter
from qbench.attention.normalizers.scalable import Scalable
from qbench.attention.normalizers.sigmoid import Sigmoid
from qbench.attention.normalizers.softmax import Rectified, Softmax, Softmax1, SoftmaxSink
from qbench.attention.normalizers.softpick import Softpick
from qbench.plugins import Registry

__all__ = ["NORMALIZERS", "SLOPES", "Kernels", "Normalizer", "Parameter", "register"]

NORMALIZERS: Registry[Normalizer] = Registry("normalizer")


def register(normalizer: Normalizer) -> Normalizer:
    """Register ``normalizer`` under its name for recipes, checkpoints and attention, and return it.
    Raises ValueError if the name is taken, or if its kernels do not take each of its parameters;
    RecipeError for a text that is no name."""
    for parameter in normalizer.parameters if normalizer.kernels else ():
        if parameter.name not in normalizer.kernels.parameters:
            raise ValueError(
                f"the kernels of {normalizer.name!r} do not take its parameter {parameter.name!r}; "
                "set kernels = None, so that the reference computes it, or remove the parameter"
            )
    return NORMALIZERS.add(normalizer.name, normalizer)


for _normalizer in (
    Softmax(),
    Softpick(),
    Rectified(),
    Sigmoid(),
    Softmax1(),
    SoftmaxSink(),
    Scalable(Softmax()),
    Scalable(Softpick()),
    Scalable(Softmax(), one_more=True),
    Scalable(Softpick(), one_more=True),
):
    register(_normalizer)
