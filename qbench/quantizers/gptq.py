"""GPTQ. Settings: ``qbench.quantizers.weights.Gptq``."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from qbench.quantizers import gptq_library, gptq_torch, packed
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import PackedWeight, Progress
from qbench.quantizers.linear import Plain, Tensors
from qbench.quantizers.weights import Gptq

_BACKENDS = {"gptqmodel": gptq_library, "torch": gptq_torch}


def quantize_model(
    model: PreTrainedModel, settings: Gptq, calibration: Calibration, progress: Progress
) -> tuple[dict[str, Tensors], str]:
    return _BACKENDS[settings.backend].quantize(model, settings, calibration, progress)


def from_packed(shape: Plain, tensors: Tensors, settings: Gptq) -> nn.Module:
    return (gptq_library.rebuild if settings.backend == "gptqmodel" else packed.from_packed)(
        shape, tensors, settings
    )


def unpack(module: nn.Module, settings: Gptq) -> PackedWeight | None:
    return (gptq_library.read if settings.backend == "gptqmodel" else packed.unpack)(
        module, settings
    )
