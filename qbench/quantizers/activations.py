"""Formats of activations: settings. Imports no torch.

A linear layer's input is rounded to a format and multiplied in the model's dtype.

FP8 is E4M3 with a float32 scale. MX formats have blocks of 32 with a power of two as scale (OCP
Microscaling Formats v1.0, 2023). NVFP4 has blocks of 16 with an E4M3 scale under a float32 one of
the tensor (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.errors import QuantizationError
from qbench.quantizers.config import (
    SETTINGS,
    WHOLE_ROW,
    ActivationSettings,
    GroupSize,
    Patterns,
    strategy,
)
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.names import ACTIVATIONS, register_combination
from qbench.records import UNQUANTIZED_BITS, Part

MX_BLOCK, NVFP4_BLOCK = 32, 16


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class FakeQuantized(ActivationSettings):
    """Inputs of linear layers rounded to ``format``. A subclass gives it, and ``scheme``."""

    ignore: Annotated[
        Patterns,
        Field(
            strict=False,
            description="layers whose inputs stay unquantized: parts of their names, such as "
            "down_proj, or patterns over whole names, such as '*.o_proj'",
        ),
    ] = ()

    backend: ClassVar[str] = "activation_inputs"

    @property
    @abstractmethod
    def format(self) -> QuantFormat: ...

    @property
    @abstractmethod
    def scheme(self) -> str:
        """In the field's words: ``int8 per token``."""

    @property
    def precision(self) -> Part:
        return Part(bits=self.format.num_bits, scheme=self.scheme, simulated=True)

    @property
    def needs_calibration(self) -> bool:
        return not self.format.dynamic

    @property
    def batch_invariant(self) -> bool:
        return not self.format.one_of_tensor

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        group = self.format.group_size
        if group != WHOLE_ROW and columns % group:
            raise QuantizationError(
                f"{self.name}: {name} has {columns} inputs, no multiple of the {group} that share "
                f"a scale; leave it out, ignore: [{name.rpartition('.')[2]}], or choose another "
                "format"
            )


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Scaled(FakeQuantized):
    """Integers or FP8 times a float32 scale.

    ``per`` token: a scale each, or one for each group along it, from its own values: nothing is
    clipped. tensor: one for a layer's whole input, so that every token of a batch depends on all
    others. static: one a layer, fixed on calibration text: the cheapest in hardware, and the case
    of the literature on outliers (Bondarenko et al. 2021, 2023).
    """

    num_bits: Annotated[int, Field(ge=2, le=8)] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    per: Literal["token", "tensor", "static"] = "token"
    group_size: Annotated[
        GroupSize, Field(description="values along a token that share a scale; -1 is all of them")
    ] = WHOLE_ROW

    @property
    def format(self) -> QuantFormat:
        whole: Literal["token", "tensor"] = "token" if self.per == "token" else "tensor"
        return QuantFormat(
            num_bits=self.num_bits,
            type=self.type,
            symmetric=self.symmetric,
            strategy=whole if self.group_size == WHOLE_ROW else "group",
            group_size=self.group_size,
            dynamic=self.per != "static",
        )

    @property
    def name(self) -> str:
        if self.type == "float":
            return f"fp8-{'row' if self.per == 'token' else self.per}"
        return f"int{self.num_bits}-{self.per}{'' if self.symmetric else '-asymmetric'}"

    @property
    def scheme(self) -> str:
        token = "per token" if self.type == "int" else "per row"
        per = {
            "token": token if self.group_size == WHOLE_ROW else strategy(self.group_size),
            "tensor": "per tensor, dynamic",
            "static": "per tensor, static",
        }[self.per]
        element = "fp8 e4m3" if self.type == "float" else f"int{self.num_bits}"
        return f"{element} {per}{'' if self.symmetric else ', asymmetric'}"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Mx(FakeQuantized):
    """Blocks of 32 along a token, a power of two as scale: values beyond the largest element are
    clipped to it, as the specification has it."""

    num_bits: Literal[4, 8]

    @property
    def name(self) -> str:
        return f"mxfp{self.num_bits}"

    @property
    def format(self) -> QuantFormat:
        return QuantFormat(
            num_bits=self.num_bits,
            type="float",
            strategy="group",
            group_size=MX_BLOCK,
            scale_dtype="float8_e8m0fnu",
        )

    @property
    def scheme(self) -> str:
        return f"mxfp{self.num_bits} in blocks of {MX_BLOCK}"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Nvfp4(FakeQuantized):
    """E2M1 in blocks of 16 along a token; each block's scale is E4M3 times the layer's."""

    name: ClassVar[str] = "nvfp4"

    tensor_scale: Annotated[
        Literal["static", "dynamic", "none"],
        Field(
            description="the layer's scale: static, from calibration text; dynamic, from its "
            "whole input at once, so scores depend on the batch; none: 1"
        ),
    ] = "static"

    @property
    def format(self) -> QuantFormat:
        return QuantFormat(
            num_bits=4,
            type="float",
            strategy="group" if self.tensor_scale == "none" else "tensor_group",
            group_size=NVFP4_BLOCK,
            dynamic=self.tensor_scale != "static",
            scale_dtype="float8_e4m3fn",
        )

    @property
    def scheme(self) -> str:
        return f"nvfp4 in blocks of {NVFP4_BLOCK}, tensor scale {self.tensor_scale}"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class RoundingNoise(ActivationSettings):
    """Noise of the size of rounding on what each decoder layer gives."""

    backend: ClassVar[str] = "noise_floor"
    name: ClassVar[str] = "rounding-noise"
    ignore: ClassVar[tuple[str, ...]] = ("*",)  # what linear layers take in stays as it is

    @property
    def precision(self) -> Part:
        return Part(bits=UNQUANTIZED_BITS, scheme="rounding noise of the dtype after each layer")


_ELEMENTS: list[tuple[str, dict[str, Any]]] = [
    ("int{}{}".format(_bits, "" if _symmetric else " with a zero point"),
     {"num_bits": _bits, "type": "int", "symmetric": _symmetric})
    for _bits in (8, 6, 4)
    for _symmetric in (True, False)
]  # fmt: skip
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": WHOLE_ROW}
for _per, _line, _more in (
    ("token", "one scale a token, from its own values", {}),
    ("tensor", "one scale a batch; scores depend on the batch",
     {"group_size": WHOLE_ROW}),
    ("static", "one scale a layer, fixed on calibration text", {"group_size": WHOLE_ROW}),
):  # fmt: skip
    for _element, _stated in (*_ELEMENTS, ("fp8 e4m3", _FP8)):
        _fixed: dict[str, Any] = {"per": _per, **_more, **_stated}
        ACTIVATIONS.register(Scaled(**_fixed).name, Scaled, f"{_element}, {_line}", **_fixed)
for _bits, _element in ((8, "e4m3"), (4, "e2m1")):
    _line = f"MXFP{_bits}: {_element} in blocks of 32, a power of two as scale"
    ACTIVATIONS.register(f"mxfp{_bits}", Mx, _line, num_bits=_bits)
ACTIVATIONS.register("nvfp4", Nvfp4, "NVFP4: e2m1 in blocks of 16, e4m3 scales")
ACTIVATIONS.register(
    "rounding-noise", RoundingNoise, "noise of rounding after each layer: KL's noise floor"
)

for _name, _weights, _activations, _line in (
    ("w8a8-int8", "int8-row", "int8-token", "int8: weights a row, activations a token"),
    ("w8a8-int8-static", "int8-row", "int8-static", "int8: weights a row, activations fixed"),
    ("w8a8-fp8", "fp8-row", "fp8-row", "fp8 e4m3: weights a row, activations a token"),
    ("w8a8-fp8-tensor", "fp8-tensor", "fp8-tensor", "fp8 e4m3: one scale a matrix and a batch"),
):
    register_combination(
        _name,
        _line,
        weights=_weights,
        activations=_activations,
    )
register_combination(
    "noise-floor",
    "the unquantized model with rounding noise of its dtype after each layer",
    activations="rounding-noise",
)
