"""Quantize models: settings by name, quantized layers, and the audit that compares both.

What is imported here needs no torch: ``qbench plan`` and ``qbench list`` start at once. The work is
in ``quantize.quantize``, ``calibration.read_calibration`` and ``audit.compare.audit``."""

import importlib
import pkgutil

from qbench.quantizers import methods, published
from qbench.quantizers.config import PackedWeight, QuantizationConfig, WeightSettings, settings
from qbench.quantizers.methods.weight_only import Rtn
from qbench.quantizers.registry import METHODS, config_of, register, unquantized_dtype

for _module in pkgutil.iter_modules(methods.__path__):  # each registers its settings
    importlib.import_module(f"{methods.__name__}.{_module.name}")
