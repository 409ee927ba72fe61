"""Round the inputs of linear layers to few bits, by a forward pre-hook on each layer; static scales
come from their inputs on calibration text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.progress import Advance
from qbench.quantizers.calibration import Calibration, watch_inputs
from qbench.quantizers.config import ActivationEvidence, ignore_advice, matching, require_matches
from qbench.quantizers.fake_quant import FakeQuant, scale_of_tensor
from qbench.quantizers.linear import kept_in_float32, matrices
from qbench.quantizers.methods.input_formats import RoundedInputs

ATTRIBUTE = "qbench_inputs"  # of a model whose activations are quantized


def layers_with_inputs(model: nn.Module, ignore: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """Return, by name, the modules that multiply by a weight matrix: linear layers, however their
    weights are stored. Left out: the LM head, layers that ``ignore`` names, and those that the
    model's class keeps in float32. Raises QuantizationError for a pattern of ``ignore`` that
    matches no weight matrix."""
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    require_matches({**layers, **matrices(model)}, ignore, "activations")
    left_out = matching(layers, ignore) | kept_in_float32(model, layers)
    return {name: module for name, module in layers.items() if name not in left_out}


def install(model: nn.Module, settings: RoundedInputs, tensors: Mapping[str, Tensor]) -> None:
    """Quantize the inputs of the layers of ``model``, with the ``tensors`` of ``calibrate`` (empty:
    dynamic scales). Raises QuantizationError for layers whose inputs groups do not divide."""
    modules, form = layers_with_inputs(model, settings.ignore), settings.format
    settings.check_layers({n: (m.out_features, m.in_features) for n, m in modules.items()})
    fixed = {name: scale_of_tensor(*ends, form) for name, ends in tensors.items()}
    inputs = FakeQuant(form, {name: fixed.get(name) for name in modules})
    for name, module in modules.items():
        module.register_forward_pre_hook(inputs.hook(name))
    setattr(model, ATTRIBUTE, inputs)


def evidence(model: nn.Module, settings: RoundedInputs) -> dict[str, ActivationEvidence]:
    """Return the format and static scale of each module's input, by module's name. ``settings`` is
    not used."""
    inputs = getattr(model, ATTRIBUTE)
    scales = inputs.scales.items()
    return {n: ActivationEvidence(format=inputs.form, fixed=fixed) for n, fixed in scales}


# Ranges on calibration text


@torch.no_grad()
def calibrate(
    model: nn.Module, settings: RoundedInputs, calibration: Calibration | None, progress: Advance
) -> dict[str, Tensor]:
    """Return [lowest, highest] input over the calibration text by module's name; of a symmetric
    format −largest and largest magnitude. Samples are read one at a time. Empty for dynamic scales,
    which need no ``calibration``. Raises QuantizationError for a module that the text never
    reaches, or whose inputs are not finite."""
    if not settings.needs_calibration:
        return {}
    modules, device = layers_with_inputs(model, settings.ignore), next(model.parameters()).device
    start = torch.tensor([torch.inf, -torch.inf], device=device)
    ranges = {name: start.clone() for name in modules}
    symmetric = settings.format.symmetric

    def observe(name: str, x: Tensor) -> None:
        if x.numel():
            low, high = torch.aminmax(x.float())
            ends = ranges[name]
            ranges[name] = torch.stack([torch.minimum(ends[0], low), torch.maximum(ends[1], high)])

    watch_inputs(model, modules, observe, calibration.ids.split(1), progress)
    for name, (low, high) in ranges.items():
        problem = ""
        if high < low:
            problem = "no calibration text reaches this layer; raise calibration.samples, or leave "
            problem += "it out"
        elif not (low.isfinite() and high.isfinite()):
            problem = "its inputs on calibration text are not finite; leave the layer out"
        if problem:
            raise QuantizationError(f"{name}: {problem}: {ignore_advice([name], modules)}")
        if symmetric:
            largest = torch.maximum(-low, high)
            ranges[name] = torch.stack([-largest, largest])
    return ranges
