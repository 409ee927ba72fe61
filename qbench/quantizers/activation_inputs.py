"""Inputs of linear layers in few bits: rounded by a pre-hook on each, or multiplied as codes.

Where scales are fixed before, they come from what layers take in on calibration text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.progress import Advance
from qbench.quantizers import scaled_mm
from qbench.quantizers.activations import FakeQuantized
from qbench.quantizers.calibration import Calibration, watch_inputs
from qbench.quantizers.config import ActivationEvidence, matching, require_matches
from qbench.quantizers.fake_quant import CODES, FakeQuant, scale_of_tensor
from qbench.quantizers.linear import matrices

ATTRIBUTE = "qbench_inputs"  # of a model whose activations are quantized


def layers_with_inputs(model: nn.Module, ignore: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """The modules of ``model`` that multiply by a weight matrix, by name: linear layers, however
    their weights are stored. Without the LM head and what ``ignore`` names.

    Raises QuantizationError for a pattern that names none of them, and no other weight matrix.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {
        name: module
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    require_matches({**found, **matrices(model)}, ignore, "activations")
    ignored = matching(found, ignore)
    return {name: module for name, module in found.items() if name not in ignored}


def install(model: nn.Module, settings: FakeQuantized, tensors: Mapping[str, Tensor]) -> None:
    """Let layers of ``model`` take in what ``settings`` make of their inputs; ``tensors`` are those
    of ``calibrate``. Raises QuantizationError for a layer whose width groups do not divide, or
    that cannot multiply codes."""
    modules, form = layers_with_inputs(model, settings.ignore), settings.format
    for name, module in modules.items():
        settings.check_layer(name, module.out_features, module.in_features)
    assert getattr(settings, "arithmetic", "") != "auto"  # a plan has decided
    fixed = {name: scale_of_tensor(*ends, form) for name, ends in tensors.items()}
    inputs = FakeQuant(form, {name: fixed.get(name) for name in modules})
    for name, module in modules.items():
        if settings.real:
            multiply_codes(name, module, inputs)
        else:
            module.register_forward_pre_hook(inputs.hook(name))
    setattr(model, ATTRIBUTE, inputs)


def multiply_codes(name: str, module: nn.Module, inputs: FakeQuant) -> None:
    """Let ``module`` multiply codes of ``inputs`` by codes. Raises QuantizationError, in its
    ``name``, where it cannot: libraries skip those."""
    form, known = inputs.form, isinstance(module, scaled_mm.ScaledLinear)
    if not known or module.codes.dtype != CODES[form.type]:
        raise QuantizationError(
            f"{name}: {type(module).__name__} holds no {form.element} codes for real products; "
            "set arithmetic: simulated"
        )
    module.__class__ = scaled_mm.ScaledMM
    module.inputs, module.fixed = inputs, inputs.scales[name]


def evidence(model: nn.Module, settings: FakeQuantized) -> dict[str, ActivationEvidence]:
    """What is installed in ``model``."""
    inputs = getattr(model, ATTRIBUTE, None)
    if inputs is None:
        return {}
    return {
        name: ActivationEvidence(format=inputs.form, fixed=fixed, inside=settings.real)
        for name, fixed in inputs.scales.items()
    }


@contextmanager
def weights_alone(model: nn.Module) -> Iterator[None]:
    """Within it the inputs of ``model`` stay as they are."""
    inputs = getattr(model, ATTRIBUTE, None) or SimpleNamespace()
    inputs.paused = True
    try:
        yield
    finally:
        inputs.paused = False


# Ranges on calibration text

PATTERNS = 2**16  # of the upper half of a float32: sign, exponent, 7 bits of mantissa
SIGN = 2**15


class Observer:
    """What one layer took in, or, ``symmetric``, its magnitudes: the two ends in full and, for a
    ``percentile`` below 100, how often each bfloat16 value came."""

    def __init__(self, device: torch.device, *, symmetric: bool, percentile: float) -> None:
        self.symmetric, self.percentile = symmetric, percentile
        kinds = PATTERNS if percentile < 100 else 0
        self.counts = torch.zeros(kinds, dtype=torch.int64, device=device)
        self.low = torch.tensor(torch.inf, device=device)
        self.high = torch.tensor(-torch.inf, device=device)

    def add(self, x: Tensor) -> None:
        flat = x.float().reshape(-1)
        if not flat.numel():
            return
        if self.symmetric:
            flat = flat.abs()
        if self.percentile < 100:
            upper = (flat.view(torch.int32) >> 16) & (PATTERNS - 1)
            # not bincount, which waits for the device twice
            self.counts.scatter_add_(0, upper.long(), torch.ones_like(upper, dtype=torch.int64))
        low, high = torch.aminmax(flat)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def range(self) -> Tensor:
        """[low, high], float32: what ``percentile`` per cent of the values lie within.

        100 gives the smallest and the largest value. Below it, ends are rounded towards 0 to
        bfloat16's next value, at most 0.8 % away.
        """
        low, high = self.low, self.high
        if self.percentile < 100:
            inside = self.percentile / 100
            tail = (1 - inside) / 2
            shares = (0.0, inside) if self.symmetric else (tail, 1 - tail)
            magnitudes = torch.arange(SIGN, dtype=torch.int32, device=low.device) << 16
            positive = magnitudes.view(torch.float32)  # of bfloat16 patterns, in order
            values = torch.cat([-positive.flip(0), positive])  # −∞ … −0, 0 … ∞
            total = torch.cat([self.counts[SIGN:].flip(0), self.counts[:SIGN]]).double().cumsum(0)
            wanted = torch.tensor(shares, dtype=total.dtype, device=low.device) * total[-1]
            low, high = values[torch.searchsorted(total, wanted).clamp(max=PATTERNS - 1)]
        return torch.stack([-high if self.symmetric else low, high])


@torch.no_grad()
def calibrate(
    model: nn.Module,
    settings: FakeQuantized,
    calibration: Calibration | None,
    progress: Advance,
) -> dict[str, Tensor]:
    """By module: [low, high] of its inputs over the calibration text, one sample at a time; empty
    where nothing is fixed. Raises QuantizationError for a module that the text never reaches."""
    if not settings.needs_calibration:
        return {}
    modules, device = layers_with_inputs(model, settings.ignore), next(model.parameters()).device
    how = {"symmetric": settings.format.symmetric, "percentile": settings.percentile}
    seen = {name: Observer(device, **how) for name in modules}
    batches = calibration.ids.split(1)
    watch_inputs(model, modules, lambda name, x: seen[name].add(x), batches, progress)
    for name, one in seen.items():
        if one.high < one.low:
            raise QuantizationError(
                f"{name}: calibration text never reaches it; add text, or leave it out: ignore: "
                f"[{name.rpartition('.')[2]}]"
            )
    found = {name: one.range() for name, one in seen.items()}
    for name, ends in found.items():
        if not ends.isfinite().all():
            raise QuantizationError(f"{name}: its inputs on calibration text are not finite")
    return found
