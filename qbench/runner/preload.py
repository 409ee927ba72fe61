"""Imported by the fork server of worker processes: what every cell needs, once for all of them."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

from qbench.machine import redirected, settle

MODULES = (
    "torch", "transformers.models.auto", "transformers.models.llama.modeling_llama",
    "lm_eval.evaluator", "lm_eval.models.huggingface", "datasets",
    "qbench.checkpoints.load", "qbench.attention.transformers", "qbench.quantizers.quantize",
    "qbench.quantizers.audit.cell", "qbench.evaluation.loaded", "qbench.evaluation.scoring",
    "qbench.evaluation.evaluate",
)  # fmt: skip

settle()
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    for module in MODULES:
        importlib.import_module(module)
gc.collect()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
