"""Quantizers: settings by name, quantized models, and the audit that proves them.

What is named here imports no torch: ``qbench plan`` and ``qbench list`` start at once. The work
is in ``quantization.quantize``, ``calibration.read_calibration`` and ``audit.audit``.
"""

from qbench.quantizers.names import QUANTIZERS, parse, requirements
from qbench.quantizers.settings import Settings

__all__ = ["QUANTIZERS", "Settings", "parse", "requirements"]
