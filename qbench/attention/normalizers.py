"""What turns scores into attention weights. Imports no torch; ``reference.py`` has the formulas.

For one query with scores x_1 … x_N over the keys it may attend to, and m = max(0, max x):

``softmax``    w_i = e^(x_i − m) / Σ_k e^(x_k − m)
``softpick``   w_i = ReLU(e^(x_i − m) − e^(−m)) / (Σ_k |e^(x_k − m) − e^(−m)| + ε), equation (1)
``rectified``  softmax over the scores that are not negative (appendix B, "rectified-only")
"""

from __future__ import annotations

from dataclasses import dataclass

from qbench.registry import Registry

EPSILON = 1e-6  # in softpick's denominator; what the paper's kernels train with


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalizer:
    """``sums_to_one``: weights of a row with anything to attend to sum to one.
    ``sparse``: weights can be exactly zero, so that key tiles may be skipped."""

    name: str
    description: str
    sums_to_one: bool
    sparse: bool


NORMALIZERS: Registry[Normalizer] = Registry("normalizer")

for _normalizer in (
    Normalizer(
        name="softmax",
        description="exponentials divided by their sum",
        sums_to_one=True,
        sparse=False,
    ),
    Normalizer(
        name="softpick",
        description="rectified e^x − 1 divided by the sum of |e^x − 1| (the paper's equation 1)",
        sums_to_one=False,
        sparse=True,
    ),
    Normalizer(
        name="rectified",
        description="softmax over the scores that are not negative (the paper's appendix B)",
        sums_to_one=False,
        sparse=True,
    ),
):
    NORMALIZERS.add(_normalizer.name, _normalizer)
