"""Import what every cell needs: in the fork server once for all workers, else before the first."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

from qbench.machine import import_transformers, redirected, set_library_env

MODULES = ("qbench.cell", "transformers.models.llama.modeling_llama")

set_library_env()
gc.disable()  # looking for garbage takes a fifth of the time of imports
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    import_transformers()
    for module in MODULES:
        importlib.import_module(module)
gc.enable()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
