"""Normalizers: functions that turn scores into attention weights, one per file. Imports no torch.

A new one is a file with a subclass of :class:`Normalizer` and a call of :func:`register`: in this
module for one that comes with qbench, in its own file for a plug-in.
"""

from __future__ import annotations

from qbench.attention.normalizers.normalizer import (
    NORMALIZERS,
    SLOPES,
    Kernels,
    Normalizer,
    Parameter,
    Scalable,
    register,
)
from qbench.attention.normalizers.sigmoid import Sigmoid
from qbench.attention.normalizers.softmax import Rectified, Softmax, Softmax1, SoftmaxSink
from qbench.attention.normalizers.softpick import Softpick

__all__ = ["NORMALIZERS", "SLOPES", "Kernels", "Normalizer", "Parameter", "register"]

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
