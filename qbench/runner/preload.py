"""Imported by the fork server of worker processes: what every cell needs, once for all of them."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

from qbench.machine import cuda_is_likely, redirected, settle

MODULES = (
    "torch", "transformers.models.auto", "transformers.models.llama.modeling_llama",
    "lm_eval.evaluator", "lm_eval.models.huggingface", "datasets",
    "qbench.checkpoints.load", "qbench.evaluation.loaded", "qbench.evaluation.evaluate",
)  # fmt: skip
# They start a GPU's driver (bitsandbytes, Gluon), which no fork can use then.
WITHOUT_GPU = (
    "qbench.attention.transformers", "qbench.quantizers.quantize",
    "qbench.quantizers.audit.cell", "qbench.evaluation.scoring",
)  # fmt: skip

settle()
with redirected(Path(os.devnull)), suppress(Exception):  # what is missing is said where it is used
    for module in (*MODULES, *(() if cuda_is_likely() else WITHOUT_GPU)):
        importlib.import_module(module)
gc.collect()
gc.freeze()  # what is shared stays so: no fork looks through it for garbage
