"""The start of a worker process: what every cell needs, and nothing that none does."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from qbench.machine.quiet import redirected

MODULES = (
    "torch", "transformers.models.auto", "transformers.models.llama.modeling_llama",
    "lm_eval.evaluator", "lm_eval.models.huggingface", "datasets",
    "qbench.checkpoints.load", "qbench.attention.interface", "qbench.evaluation.scoring",
    "qbench.evaluation.evaluate", "qbench.quantizers.quantization",
)  # fmt: skip
# transformers imports these where they are installed: hqq for a quantized cache, torchao for its
# own quantizer, scipy for losses of object detection. hqq and torchao bring torch's code generator.
# A cell that needs one of them imports it by itself.
LEFT_ASIDE = ("is_hqq_available", "is_torchao_available", "is_scipy_available")
IMPORTERS = (
    "transformers.cache_utils", "transformers.loss.loss_utils", "transformers.quantizers.auto",
)  # fmt: skip


def warm_up(device: str) -> int:
    """Import what a cell needs, while its plan is still made; the process's id.

    What cannot be imported is left to the cell that needs it, which says so in its log.
    """
    if device == "cuda":
        threading.Thread(target=make_context, daemon=True).start()
    with redirected(Path(os.devnull)), contextlib.suppress(Exception):
        with _left_aside():
            for module in IMPORTERS:
                importlib.import_module(module)
        for module in MODULES:
            importlib.import_module(module)
        if device == "cuda":
            import torch

            torch.zeros(1, device=device)
    return os.getpid()


def make_context() -> None:
    """Have the driver make the GPU's context, which torch takes up later. Seconds in which Python
    does nothing: ctypes lets other threads go on meanwhile."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


@contextlib.contextmanager
def _left_aside() -> Iterator[None]:
    """In the body transformers takes libraries that are left aside for missing; afterwards every
    module that asked gets the true answer."""
    utils = importlib.import_module("transformers.utils")
    real = {name: getattr(utils, name) for name in LEFT_ASIDE if hasattr(utils, name)}

    def missing() -> bool:
        return False

    for name in real:
        setattr(utils, name, missing)
    try:
        yield
    finally:
        asked = [one for name, one in sys.modules.items() if name.startswith("transformers.")]
        for module in asked:
            for name, function in real.items():
                if vars(module).get(name) is missing:
                    setattr(module, name, function)
