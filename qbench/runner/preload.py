"""Imported by the fork server of worker processes: what every cell needs, once for all of them."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

from qbench.machine import redirected, settle

MODULES = ("qbench.cell", "transformers.models.llama.modeling_llama")

settle()
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    for module in MODULES:
        importlib.import_module(module)
gc.collect()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
