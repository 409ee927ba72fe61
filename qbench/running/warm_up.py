"""The start of a worker process: what every cell needs, and nothing that none does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType

from qbench.machine.clock import mark
from qbench.machine.installed import packages_distributions
from qbench.machine.quiet import redirected
from qbench.running.workers import First

MODULES = (
    "torch", "transformers.models.auto", "transformers.models.llama.modeling_llama",
    "lm_eval.evaluator", "lm_eval.models.huggingface", "datasets",
    "qbench.checkpoints.load", "qbench.attention.transformers", "qbench.quantizers.quantize",
    "qbench.quantizers.audit.cell", "qbench.evaluation.tasks", "qbench.evaluation.scoring",
    "qbench.evaluation.evaluate",
)  # fmt: skip
# transformers imports these where they are installed: hqq for a quantized cache, torchao for its
# own quantizer, scipy for losses of object detection, scikit-learn (and through it half of scipy)
# for one way of assisted generation, torchvision and torchaudio for processors of images and sound.
# hqq and torchao bring torch's code generator. A cell that needs one of them imports it by itself.
LEFT_ASIDE = (
    "is_hqq_available", "is_torchao_available", "is_scipy_available", "is_sklearn_available",
    "is_torchvision_available", "is_torchaudio_available",
)  # fmt: skip
IMPORTERS = (
    "transformers.cache_utils", "transformers.loss.loss_utils", "transformers.quantizers.auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


def first(device: str) -> First:
    """What a worker process on ``device``, cpu or cuda, does before its first cell."""
    return First(partial(warm_up, device), import_all, partial(start_gpu, device))


def warm_up(device: str) -> None:
    """Import what a cell needs, while its plan is still made."""
    if device == "cuda":
        threading.Thread(target=make_context, daemon=True).start()
    import_all()
    start_gpu(device)


def import_all() -> None:
    """Starts no GPU."""
    mark("worker process imports")
    with redirected(Path(os.devnull)), for_good():
        with _left_aside():
            _import(IMPORTERS)
        _import(MODULES)


def start_gpu(device: str) -> None:
    """Have PyTorch take up its GPU, where it has one."""
    if device == "cuda":
        with redirected(Path(os.devnull)), contextlib.suppress(Exception):
            import torch

            torch.zeros(1, device=device)
    mark("worker process ready")


def _import(modules: Sequence[str]) -> None:
    """What cannot be imported is said where it is used."""
    with contextlib.suppress(Exception):
        for module in modules:
            importlib.import_module(module)
            mark(f"imported {module}")


@contextlib.contextmanager
def for_good() -> Iterator[None]:
    """What the body makes stays until the process ends, as imported modules do: the garbage
    collector, which would take a fifth of the time of imports, waits, and never looks at it again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


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
    module that asked gets the true answer. It asks Python who holds each package, too."""
    slow = metadata.packages_distributions
    metadata.packages_distributions = packages_distributions
    try:
        utils = importlib.import_module("transformers.utils")
        with _missing(utils):
            yield
    finally:
        metadata.packages_distributions = slow


@contextlib.contextmanager
def _missing(utils: ModuleType) -> Iterator[None]:
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
