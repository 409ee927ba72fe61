"""From settings to a quantized model: made once, then always read from disk.

What is scored is what lies on disk, also on the first run: a library whose model differs before
and after saving cannot give one number today and another tomorrow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from qbench.errors import QbenchError, QuantizationError
from qbench.quantizers.artifacts import Artifact, Damaged, artifact
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.linears import Tensors, linears, plain
from qbench.quantizers.settings import Gptq, Settings, Unquantized


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A model ready to be scored, and a line on how it came about."""

    model: PreTrainedModel
    detail: str


def quantize(
    model: PreTrainedModel,
    tokenizer: Any,
    settings: Settings,
    *,
    calibration: Calibration | None,
    digest: str,
    artifacts: Path,
    progress: Callable[[str, float], None] | None = None,
) -> Quantized:
    """Replace every linear layer of ``model``, the LM head aside, by a quantized one.

    ``model`` lies on its device in ``settings.compute_dtype`` and is consumed. ``digest`` is of the
    original weights; ``artifacts`` the root folder of quantized weights. ``tokenizer`` is not
    needed: ``calibration`` holds token ids. ``progress`` is told what is at work and how far it is,
    0 to 1. The model's attention stays what it was.

    Raises QuantizationError where the quantizer refuses the model, UnavailableError where its
    library is not there.
    """
    report = progress or (lambda what, done: None)
    dtypes = {layer.weight.dtype for layer in linears(model).values()}
    if not dtypes:
        raise QuantizationError(f"{settings.name}: {type(model).__name__} has no linear layers")
    assert dtypes == {getattr(torch, settings.compute_dtype)}, f"{settings.name}: model in {dtypes}"
    if isinstance(settings, Unquantized):
        return Quantized(model=model, detail=f"unquantized, {settings.dtype}")
    if settings.needs_calibration and calibration is None:
        raise QuantizationError(f"{settings.name}: needs calibration text; the recipe has none")
    if not settings.needs_calibration:
        calibration = None
    method = method_of(settings)
    attention = model.config._attn_implementation
    store = artifact(
        artifacts,
        digest=digest,
        settings=settings,
        calibration=calibration,
        attention=attention,
        device=model.device,
    )
    shapes = {name: plain(layer) for name, layer in linears(model).items()}
    with store.locked(lambda: report("waiting for another process that quantizes the same", 0.0)):
        tensors, detail = _obtain(store, model, settings, calibration, report)
    if set(tensors) != set(shapes):
        raise QuantizationError(f"{settings.name}: not quantized: {set(shapes) - set(tensors)}")
    for name, shape in shapes.items():
        model.set_submodule(name, method.rebuild(shape, tensors.pop(name), settings))
    assert model.config._attn_implementation == attention
    report("quantized", 1.0)
    return Quantized(model=model.eval(), detail=detail)


def method_of(settings: Settings) -> ModuleType:
    """The module with ``quantize``, ``rebuild`` and ``read`` for these settings."""
    name = settings.method
    if isinstance(settings, Gptq):
        if settings.backend == "auto-gptq":
            importlib.import_module("qbench.quantizers.gptq").require_auto_gptq()
        name = {"gptqmodel": "gptq", "torch": "gptq_torch"}[settings.backend]
    return importlib.import_module(f"qbench.quantizers.{name}")


def _obtain(
    store: Artifact,
    model: PreTrainedModel,
    settings: Settings,
    calibration: Calibration | None,
    report: Callable[[str, float], None],
) -> tuple[dict[str, Tensors], str]:
    """Tensors by module, from disk where they are there and whole."""
    method, again = method_of(settings), ""
    try:
        found = store.read(model.device)
        if found is not None:
            return found[0], f"artifact reused: {found[1]}"
    except Damaged as damage:
        again = f"artifact was damaged ({damage}) and made again: "
        report(f"artifact damaged ({damage}); quantizing again", 0.0)
    try:
        with torch.no_grad():
            made, note = method.quantize(model, settings, calibration, report)
    except QbenchError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise QuantizationError(f"{settings.name}: {type(error).__name__}: {line}") from error
    store.write(made, note)
    written = store.read(model.device)
    assert written is not None
    return written[0], f"{again}{note}"
