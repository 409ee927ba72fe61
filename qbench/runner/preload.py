"""Import what every cell needs: in the fork server once for all workers, else before the first."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path

from qbench.machine import import_transformers, redirected, set_library_env

set_library_env()
gc.disable()  # looking for garbage takes a fifth of the time of imports
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    importlib.import_module("qbench.plan")  # without PyTorch, whose libraries a thread loads
    if "qbench.api" not in sys.modules:  # else a user's own code will ask for what it leaves out
        import_transformers()
    importlib.import_module("qbench.cell")
    if parent_process() is None:  # else beside a cell's weights
        importlib.import_module("qbench.cell_tasks")
gc.enable()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
