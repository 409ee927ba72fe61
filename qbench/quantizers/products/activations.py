"""Activations in formats that matrix products of hardware take in: multiplied as codes, or rounded
and multiplied in the model's dtype. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers.activations.simulated import Simulated
from qbench.quantizers.config import SETTINGS, ActivationEvidence, Grid, WeightSettings
from qbench.quantizers.products.weights import ScaledWeights
from qbench.records import Part

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

CODES = {("symmetric", 8): "int8", ("e4m3", 8): "e4m3"}  # of a grid with float32 scales
WEIGHTS = {"int8": "int8-row", "e4m3": "fp8-row or fp8-tensor"}
MULTIPLE = {"int8": 8, "e4m3": 16}  # of inputs and outputs, in cuBLAS
VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}  # without, PyTorch's int8 products are wrong
CAPABILITY = {"int8": (8, 0), "e4m3": (8, 9)}  # Ampere; Ada and Hopper


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Multiplied(Simulated):
    """A format, and whether codes are multiplied by codes."""

    arithmetic: Annotated[
        Literal["simulated", "real", "auto"],
        Field(
            description="real: codes times codes, with weights of the same format; simulated: "
            "rounded values in the model's dtype; auto: real where it can be, decided when planned"
        ),
    ] = "simulated"

    @property
    def precision(self) -> Part:
        simulated = {"simulated": True, "real": False, "auto": None}[self.arithmetic]
        return Part(bits=self.grid.bits, scheme=self.scheme, simulated=simulated)

    @property
    def requirements(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("torchao",) if self.arithmetic == "real" else ()

    def resolved(
        self, weights: WeightSettings | None, config: Mapping[str, Any], device: str
    ) -> tuple[Multiplied, str]:
        if self.arithmetic == "simulated":
            return self, ""
        obstacle = self._obstacle(weights, config, device)
        if self.arithmetic == "auto":
            chosen = "simulated" if obstacle else "real"
            reason = f", since {obstacle}" if obstacle else ""
            line = f"{self.name}: arithmetic auto: {chosen}{reason}"
            return dataclasses.replace(self, arithmetic=chosen), line
        if obstacle:
            raise RecipeError(f"{self.name}: arithmetic: real: {obstacle}; say simulated or auto")
        return self, ""

    def install(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        if self.arithmetic == "auto":
            raise QuantizationError(
                f"{self.name}: arithmetic: auto is decided where a run is planned; say real or "
                "simulated here"
            )
        if self.arithmetic == "simulated":
            super().install(model, tensors)
            return
        from qbench.quantizers.activations.inputs import fixed_ranges, multipliers
        from qbench.quantizers.products import real

        real.install(
            model,
            multipliers(model, self.ignore),
            CODES[self.grid.kind, self.grid.bits],
            "tensor" if self.scale_of == "tensor" else "row",
            fixed_ranges(tensors, self.grid),
        )

    def evidence(self, model: nn.Module) -> Mapping[str, ActivationEvidence]:
        found = super().evidence(model)
        if self.arithmetic != "real":
            return found
        return {name: dataclasses.replace(one, inside=True) for name, one in found.items()}

    def _obstacle(
        self, weights: WeightSettings | None, config: Mapping[str, Any], device: str
    ) -> str | None:
        """Why codes cannot be multiplied by codes; None where they can."""
        kind = _codes(self.grid) if self.group == -1 else None
        if kind is None:
            return f"products of hardware take no {self.scheme}"
        if not isinstance(weights, ScaledWeights) or weights.codes != kind:
            found = weights.name if weights else "unquantized ones"
            return f"it takes weights: {WEIGHTS[kind]}, not {found}"
        if spared := [name for name in weights.ignore if name not in self.ignore]:
            return f"weights leave {spared[0]} out and activations do not"
        if kind == "e4m3" and weights.compute_dtype != "bfloat16":
            return f"fp8 products give bfloat16, not {weights.compute_dtype}"
        for width in ("hidden_size", "intermediate_size"):
            size = config.get(width)
            if isinstance(size, int) and size % MULTIPLE[kind]:
                return f"{width} {size} is no multiple of {MULTIPLE[kind]}"
        return _device_obstacle(kind, device)


def _codes(grid: Grid) -> str | None:
    return CODES.get((grid.kind, int(grid.bits))) if grid.scale_format == "float32" else None


def _device_obstacle(kind: str, device: str) -> str | None:
    from qbench.machine.devices import capability, cpu_flags

    if device == "cpu":
        if kind == "e4m3":
            return "fp8 products need a GPU"
        flags = cpu_flags()
        if flags and not flags & VNNI:
            return "int8 sums saturate on this CPU, which has no VNNI"
        return None
    here, least = capability(), CAPABILITY[kind]
    if here < least:
        format = "fp8" if kind == "e4m3" else kind
        return "{} products need a GPU of compute capability {}.{}, and this one has {}.{}".format(
            format, *least, *here
        )
    return None
