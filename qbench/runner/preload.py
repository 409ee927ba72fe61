"""Imported by the fork server of worker processes: what every cell needs, once for all of them."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from qbench.machine import redirected, set_library_env

MODULES = ("qbench.cell", "transformers.models.llama.modeling_llama")

set_library_env()
gc.disable()  # looking for garbage takes a fifth of the time of imports
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    utils = importlib.import_module("transformers.utils")
    # for a cache that no cell has: hqq brings torch's code generator, a sixth of the time
    with patch.object(utils, "is_hqq_available", return_value=False):
        importlib.import_module("transformers.cache_utils")
    for module in MODULES:
        importlib.import_module(module)
gc.enable()
gc.collect()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
