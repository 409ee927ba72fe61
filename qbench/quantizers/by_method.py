"""The backend of settings that bring their functions with them as methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qbench.quantizers import heads
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import Progress


def calibrate(
    model: nn.Module, settings: Any, calibration: Calibration | None, progress: Progress
) -> dict[str, Tensor]:
    return (
        settings.calibrate(model, calibration, progress) if hasattr(settings, "calibrate") else {}
    )


def transform(model: nn.Module, settings: Any, tensors: Mapping[str, Tensor]) -> None:
    settings.treat(model, tensors)


def install(model: nn.Module, settings: Any, tensors: Mapping[str, Tensor]) -> None:
    if hasattr(settings, "install"):
        settings.install(model, tensors)


def evidence(model: nn.Module, settings: Any) -> Mapping[str, Any]:
    if isinstance(settings, heads.HeadPruning):
        return heads.evidence(model)
    return settings.evidence(model)
