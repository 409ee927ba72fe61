"""Cells in parts: weights, activations, KV cache, what is done about outliers, heads cut out.

Imports no torch. A plug-in derives from ``ActivationQuantizer``, ``KVQuantizer`` or
``OutlierTreatment`` and registers its names, as ``ACTIVATIONS.register("name", Class, "a line")``.
"""

from qbench.quantizers import heads as _heads  # noqa: F401
from qbench.quantizers.activations import floats, integers  # noqa: F401  (they register)
from qbench.quantizers.kv_cache import settings as _kv_settings  # noqa: F401
from qbench.quantizers.outliers import rotation, smoothquant  # noqa: F401  (they register)
from qbench.quantizers.parts.combined import Combined
from qbench.quantizers.parts.entry import quantizer_of, unquantized_dtype
from qbench.quantizers.parts.registries import (
    ACTIVATIONS,
    COMBINATIONS,
    HEADS,
    KV_CACHES,
    OUTLIERS,
    register_combination,
)
from qbench.quantizers.parts.settings import (
    ActivationQuantizer,
    KVQuantizer,
    OutlierTreatment,
    PartSettings,
)
from qbench.quantizers.products import combinations, weights  # noqa: F401  (they register)

__all__ = [
    "ACTIVATIONS",
    "COMBINATIONS",
    "HEADS",
    "KV_CACHES",
    "OUTLIERS",
    "ActivationQuantizer",
    "Combined",
    "KVQuantizer",
    "OutlierTreatment",
    "PartSettings",
    "quantizer_of",
    "register_combination",
    "unquantized_dtype",
]
