"""Import what every cell needs: in the fork server once for all workers, else before the first."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from qbench.machine import redirected, set_library_env

MODULES = ("qbench.cell", "transformers.models.llama.modeling_llama")

set_library_env()
gc.disable()  # looking for garbage takes a fifth of the time of imports
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    # transformers imports hqq for a cache that no cell has, and with it torch's code generator: a
    # quarter of the time. None is Python's own way to say that a module cannot be imported.
    hide = "hqq" not in sys.modules
    if hide:
        sys.modules["hqq"] = None  # type: ignore[assignment]  # so documented
    try:
        importlib.import_module("transformers.cache_utils")
    finally:
        if hide:
            del sys.modules["hqq"]
            importlib.import_module("transformers.utils").is_hqq_available.cache_clear()
    for module in MODULES:
        importlib.import_module(module)
gc.enable()
gc.collect()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
