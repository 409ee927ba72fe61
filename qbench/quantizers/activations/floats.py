"""Activations as floating-point numbers of 8 and 4 bits. Imports no torch.

FP8 is E4M3 with a float32 scale. MX formats have blocks of 32 with a power of two as scale (OCP
Microscaling Formats v1.0, 2023). NVFP4 has blocks of 16 with an E4M3 scale under a float32 one of
the tensor (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.activations.simulated import Percentile, Simulated
from qbench.quantizers.config import SETTINGS, Grid
from qbench.quantizers.names import ACTIVATIONS
from qbench.quantizers.products.activations import Multiplied

MX_BLOCK, NVFP4_BLOCK = 32, 16


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Fp8Row(Multiplied):
    """E4M3, one scale a token, from its own largest magnitude."""

    method: ClassVar[str] = "fp8"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "group"
    name: ClassVar[str] = "fp8-row"  # type: ignore[assignment]
    scheme: ClassVar[str] = "fp8 e4m3 per row"  # type: ignore[assignment]
    grid: ClassVar[Grid] = Grid(kind="e4m3", bits=8)  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Fp8Tensor(Multiplied):
    """E4M3, one scale for everything that a layer takes in at once."""

    method: ClassVar[str] = "fp8"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "tensor"
    name: ClassVar[str] = "fp8-tensor"  # type: ignore[assignment]
    scheme: ClassVar[str] = "fp8 e4m3 per tensor, dynamic"  # type: ignore[assignment]
    grid: ClassVar[Grid] = Grid(kind="e4m3", bits=8)  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Fp8Static(Multiplied):
    """E4M3, one scale a layer, fixed on calibration text."""

    method: ClassVar[str] = "fp8"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "text"
    name: ClassVar[str] = "fp8-static"  # type: ignore[assignment]
    grid: ClassVar[Grid] = Grid(kind="e4m3", bits=8)  # type: ignore[assignment]

    percentile: Percentile = 100.0

    @property
    def calibrated_share(self) -> float:
        return self.percentile

    @property
    def scheme(self) -> str:
        share = "" if self.percentile == 100 else f" ({self.percentile:g} %)"
        return f"fp8 e4m3 per tensor, static{share}"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Mx(Simulated):
    """Blocks of 32 along a token, a power of two as scale: values beyond the largest element are
    clipped to it, as the specification has it."""

    method: ClassVar[str] = "mx"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "group"
    group: ClassVar[int] = MX_BLOCK  # type: ignore[assignment]

    bits: Literal[4, 8]

    @property
    def name(self) -> str:
        return f"mxfp{self.bits}"

    @property
    def grid(self) -> Grid:
        kind = {8: "e4m3", 4: "e2m1"}[self.bits]
        return Grid(kind=kind, bits=self.bits, scale_format="e8m0")

    @property
    def scheme(self) -> str:
        return f"mxfp{self.bits} in blocks of {MX_BLOCK}"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Nvfp4(Simulated):
    """E2M1 in blocks of 16 along a token; each block's scale is E4M3 times the layer's."""

    method: ClassVar[str] = "nvfp4"
    group: ClassVar[int] = NVFP4_BLOCK  # type: ignore[assignment]
    name: ClassVar[str] = "nvfp4"  # type: ignore[assignment]
    grid: ClassVar[Grid] = Grid(kind="e2m1", bits=4, scale_format="e4m3")  # type: ignore[assignment]

    tensor_scale: Annotated[
        Literal["static", "dynamic", "none"],
        Field(
            description="the layer's scale: static, from calibration text; dynamic, from all that "
            "it takes in at once, so that scores depend on batch-mates; none, which is 1"
        ),
    ] = "static"

    @property
    def scale_of(self) -> Literal["group", "tensor", "text"]:  # type: ignore[override]
        return {"static": "text", "dynamic": "tensor", "none": "group"}[self.tensor_scale]  # type: ignore[return-value]

    @property
    def scheme(self) -> str:
        return f"nvfp4 in blocks of {NVFP4_BLOCK}, tensor scale {self.tensor_scale}"


ACTIVATIONS.register("fp8-row", Fp8Row, "fp8 e4m3, one scale a token")
ACTIVATIONS.register("fp8-tensor", Fp8Tensor, "fp8 e4m3, one scale a batch; scores depend on it")
ACTIVATIONS.register("fp8-static", Fp8Static, "fp8 e4m3, one scale a layer, fixed on text")
ACTIVATIONS.register("mxfp8", Mx, "MXFP8: e4m3 in blocks of 32, a power of two as scale", bits=8)
ACTIVATIONS.register("mxfp4", Mx, "MXFP4: e2m1 in blocks of 32, a power of two as scale", bits=4)
ACTIVATIONS.register("nvfp4", Nvfp4, "NVFP4: e2m1 in blocks of 16, e4m3 scales")
