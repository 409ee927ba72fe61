"""Weights and activations of 8 bits, multiplied in 8 bits: int8, and fp8 e4m3. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers.names import register
from qbench.quantizers.quantizer import SETTINGS, ActivationEvidence, Evidence, Stored
from qbench.quantizers.weight_quantizer import WeightQuantizer
from qbench.record import Part, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from qbench.quantizers.linears import Plain, Tensors

Arithmetic = Annotated[
    Literal["real", "simulated"],
    Field(
        description="real: products of 8-bit codes, on a GPU or, int8, on a CPU; simulated: the "
        "same values, multiplied in the model's dtype"
    ),
]
LEAST_CAPABILITY = (8, 9)  # of a GPU with float8 products


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class _W8A8(WeightQuantizer):
    """One scale a row of weights, rounded to nearest, and one a token."""

    kind: ClassVar[str]
    whole: ClassVar[int]  # what widths must be a multiple of, for real products
    method: ClassVar[str] = "w8a8"
    title: ClassVar[str] = "W8A8"
    bits: ClassVar[int] = 8

    arithmetic: Arithmetic = "real"

    @property
    def name(self) -> str:
        return f"w8a8-{self.kind}"

    @property
    def scheme(self) -> str:
        return f"{self.kind} per row"

    @property
    def real(self) -> bool:
        return self.arithmetic == "real"

    @property
    def precision(self) -> Precision:
        return Precision(
            weights=Part(bits=8, scheme=self.scheme),
            activations=Part(bits=8, scheme=f"{self.kind} per token", simulated=not self.real),
        )

    @property
    def activations_left_out(self) -> tuple[str, ...]:
        return self.leave_out

    @property
    def note(self) -> str:
        return f"{self.kind}, {self.arithmetic} products"

    @property
    def fast(self) -> bool:
        return False

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / columns

    def agreement(self, dtype: torch.dtype) -> tuple[float, float]:
        """The forward that the weights are read off multiplies by them as they are."""
        return super().agreement(dtype)

    def check(self, config: Mapping[str, Any], device: str) -> None:
        for width in ("hidden_size", "intermediate_size"):
            size = config.get(width)
            if self.real and isinstance(size, int) and size % self.whole:
                raise RecipeError(
                    f"{self.name}: {width} is {size}, and {self.kind} products need multiples of "
                    f"{self.whole}; say arithmetic: simulated"
                )

    def check_shapes(self, model: nn.Module) -> None:
        from qbench.quantizers.linears import linears_of

        for name, layer in linears_of(model, self).items():
            sizes = (layer.out_features, layer.in_features)
            if self.real and any(size % self.whole for size in sizes):
                raise QuantizationError(
                    f"{self.name}: {name} is {sizes[0]} × {sizes[1]}, and {self.kind} products "
                    f"need multiples of {self.whole}; say leave_out: [{name.rpartition('.')[2]}] "
                    "or arithmetic: simulated"
                )

    def store(self, name: str, layer: nn.Linear) -> Tensors:
        from qbench.quantizers.w8a8_layers import tensors_of

        return tensors_of(layer.weight.detach(), self.kind)

    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        from qbench.quantizers.w8a8_layers import LowPrecisionLinear

        return LowPrecisionLinear(shape, tensors, self.kind, fast=self.fast).eval()

    def read(self, module: nn.Module) -> Stored | None:
        from qbench.quantizers import w8a8_layers

        if not isinstance(module, w8a8_layers.LowPrecisionLinear):
            return None
        return w8a8_layers.read(module)

    def apply(self, model: PreTrainedModel, tensors: dict) -> PreTrainedModel:
        from qbench.quantizers.activations.inputs import install, multipliers
        from qbench.quantizers.activations.quantize import by_group
        from qbench.quantizers.w8a8_layers import GRIDS, LowPrecisionLinear, code

        model, kind = super().apply(model, tensors), self.kind
        modules = {
            name: module
            for name, module in multipliers(model).items()
            if isinstance(module, LowPrecisionLinear)
        }
        if self.real:
            install(model, modules, lambda x, _: code(x, kind))  # type: ignore[arg-type, return-value]
        else:
            install(model, modules, lambda x, _: by_group(x, GRIDS[kind]))
        return model

    def evidence(self, model: nn.Module) -> Evidence:
        from qbench.quantizers.activations.inputs import evidence
        from qbench.quantizers.w8a8_layers import GRIDS

        found: Mapping[str, ActivationEvidence] = evidence(model, GRIDS[self.kind], -1, "group")
        return Evidence(weights=super().evidence(model).weights, activations=found)

    def weights_alone(self, model: nn.Module) -> AbstractContextManager[None]:
        from qbench.quantizers.activations.inputs import weights_alone

        return weights_alone(model)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Int8(_W8A8):
    """int8 codes −127 … 127 on both sides, summed in int32."""

    kind: ClassVar[str] = "int8"
    whole: ClassVar[int] = 8


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Fp8(_W8A8):
    """E4M3 on both sides, summed by the GPU's float8 units."""

    kind: ClassVar[str] = "fp8"
    whole: ClassVar[int] = 16

    fast_accumulation: Annotated[
        bool, Field(description="sums with fewer bits, as torchao's default: quicker on Hopper")
    ] = False

    @property
    def fast(self) -> bool:
        return self.fast_accumulation

    def requirements(self) -> tuple[str, ...]:
        return ("torchao",) if self.real else ()

    def check(self, config: Mapping[str, Any], device: str) -> None:
        super().check(config, device)
        if not self.real:
            return
        if device != "cuda":
            raise RecipeError(
                f"{self.name}: float8 products need a GPU; say arithmetic: simulated, or --device "
                "cuda"
            )
        if self.compute_dtype != "bfloat16":
            raise RecipeError(
                f"{self.name}: float8 products with a scale a row give bfloat16, not "
                f"{self.compute_dtype}; say compute_dtype: bfloat16 or arithmetic: simulated"
            )
        try:
            version("torchao")
        except PackageNotFoundError:
            raise RecipeError(
                f"{self.name}: float8 products need torchao: pip install 'torchao>=0.18,<0.19', "
                "or say arithmetic: simulated"
            ) from None
        import torch

        capability = torch.cuda.get_device_capability()
        if capability < LEAST_CAPABILITY:
            raise RecipeError(
                f"{self.name}: float8 products need a GPU of compute capability 8.9, this one has "
                f"{capability[0]}.{capability[1]}; say arithmetic: simulated"
            )


register("w8a8-int8", Int8, "int8 weights a row and activations a token, multiplied in int8")
register("w8a8-fp8", Fp8, "fp8 e4m3 weights a row and activations a token, multiplied in fp8")
