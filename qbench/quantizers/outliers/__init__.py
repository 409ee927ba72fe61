"""Treatments of outliers: models that compute the same with activations easier to round.

What is named here imports no torch.
"""

from qbench.quantizers.outliers.rotation import Rotation
from qbench.quantizers.outliers.smoothquant import SmoothQuant

__all__ = ["Rotation", "SmoothQuant"]
