"""Quantizers: settings by name, quantized models, and the audit that proves them.

What is named here imports no torch: ``qbench plan`` and ``qbench list`` start at once. The work
is in ``quantize.quantize``, ``calibration.read_calibration`` and ``audit.cell.audit``.
"""

from qbench.quantizers import (  # noqa: F401  (they register)
    activations,
    kv_cache,
    lm_eval_model,
    prequantized,
    transforms,
)
from qbench.quantizers.config import (
    SETTINGS,
    PackedWeight,
    QuantizationConfig,
    WeightSettings,
)
from qbench.quantizers.names import QUANTIZERS, config_of, register, unquantized_dtype
from qbench.quantizers.weights import Rtn

__all__ = [
    "QUANTIZERS",
    "SETTINGS",
    "PackedWeight",
    "QuantizationConfig",
    "Rtn",
    "WeightSettings",
    "config_of",
    "register",
    "unquantized_dtype",
]
