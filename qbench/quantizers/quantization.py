"""From a quantizer to a quantized model: made once, then always read from disk.

What is scored is what lies on disk, also on the first run: a library whose model differs before
and after saving cannot give one number today and another tomorrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qbench.errors import QbenchError, QuantizationError
from qbench.quantizers.artifacts import Artifact, Damaged, artifact
from qbench.quantizers.audit import not_finite
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.linears import linearize, linears
from qbench.quantizers.matrices import require_matches
from qbench.quantizers.quantizer import Progress, Quantizer


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A model ready to be scored, and a line on how it came about."""

    model: PreTrainedModel
    detail: str


def quantize(
    model: PreTrainedModel,
    quantizer: Quantizer,
    *,
    calibration: Calibration | None,
    digest: str,
    artifacts: Path,
    progress: Progress | None = None,
) -> Quantized:
    """``model`` as ``quantizer`` has it.

    ``model`` lies on its device in ``quantizer.compute_dtype`` and is consumed. ``digest`` is of
    the original weights; ``artifacts`` the root folder of quantized weights. ``progress`` is told
    what is at work and how far it is, 0 to 1. The model's attention stays what it was.

    Raises QuantizationError where the quantizer refuses the model, UnavailableError where its
    library is not there.
    """
    report = progress or (lambda what, done: None)
    if not quantizer.precision.quantized:
        return Quantized(model=model, detail=f"unquantized, {quantizer.compute_dtype}")
    if quantizer.needs_calibration and calibration is None:
        raise QuantizationError(f"{quantizer.name}: needs calibration text; the recipe has none")
    quantizer.require()
    linearize(model)
    _require_sound(model, quantizer)
    attention = model.config._attn_implementation
    tensors: dict[str, Tensor] = {}
    details = []
    for prefix, stage in quantizer.stages:
        store = artifact(
            artifacts,
            digest=digest,
            quantizer=stage,
            calibration=calibration if stage.needs_calibration else None,
            attention=attention,
            device=model.device,
        )
        with store.locked(lambda: report("waiting for another process at the same weights", 0.0)):
            found, detail = _obtain(store, model, stage, calibration, report)
        tensors |= {f"{prefix}{name}": tensor for name, tensor in found.items()}
        details.append(detail)
    model = quantizer.apply(model, tensors)
    assert model.config._attn_implementation == attention
    report("quantized", 1.0)
    return Quantized(model=model.eval(), detail="; ".join(details))


def _require_sound(model: PreTrainedModel, quantizer: Quantizer) -> None:
    dtypes = {layer.weight.dtype for layer in linears(model).values()}
    if not dtypes and quantizer.precision.weights is not None:
        raise QuantizationError(f"{quantizer.name}: {type(model).__name__} has no linear layers")
    assert dtypes <= {getattr(torch, quantizer.compute_dtype)}, f"{quantizer.name}: in {dtypes}"
    require_matches(model, quantizer.leave_out, quantizer.name)
    if broken := not_finite(model):
        more = f"; and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise QuantizationError(f"{quantizer.name}: the unquantized model: {broken[0]}{more}")


def _obtain(
    store: Artifact,
    model: PreTrainedModel,
    quantizer: Quantizer,
    calibration: Calibration | None,
    report: Progress,
) -> tuple[dict[str, Tensor], str]:
    """Tensors by name, from disk where they are there and whole."""
    again = ""
    try:
        found = store.read(model.device)
        if found is not None:
            return found[0], f"artifact reused: {found[1]}"
    except Damaged as damage:
        again = f"artifact was damaged ({damage}) and made again: "
        report(f"artifact damaged ({damage}); quantizing again", 0.0)
    try:
        with torch.no_grad(), _threads(quantizer.threads, model.device):
            made = quantizer.make(model, calibration, report)
    except QbenchError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise QuantizationError(f"{quantizer.name}: {type(error).__name__}: {line}") from error
    store.write(made.tensors, made.note)
    written = store.read(model.device)
    assert written is not None
    return written[0], f"{again}{made.note}"


@contextmanager
def _threads(count: int, device: torch.device) -> Iterator[None]:
    """Compute with ``count`` threads on a CPU: the order of a sum, and with it the last bits that
    decide a rounding, depends on their number."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
