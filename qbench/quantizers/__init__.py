"""Quantizers: settings by name, quantized models, and the audit that proves them.

What is named here imports no torch: ``qbench plan`` and ``qbench list`` start at once. The work
is in ``quantization.quantize``, ``calibration.read_calibration`` and ``audit.audit``.
"""

from qbench.quantizers import unquantized, bnb, gptq, hqq, rtn, parts  # noqa: F401, I001 (they register)
from qbench.quantizers.names import QUANTIZERS, parse, register
from qbench.quantizers.parts import quantizer_of, unquantized_dtype
from qbench.quantizers.quantizer import SETTINGS, Evidence, Made, Quantizer, Stored
from qbench.quantizers.weight_quantizer import WeightQuantizer

__all__ = [
    "QUANTIZERS",
    "SETTINGS",
    "Evidence",
    "Made",
    "Quantizer",
    "Stored",
    "WeightQuantizer",
    "parse",
    "quantizer_of",
    "register",
    "unquantized_dtype",
]
