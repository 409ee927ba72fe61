"""Settings of activation formats: what the inputs of linear layers are rounded to.

FP8 is E4M3 with a float32 scale. MX formats have blocks of 32 with a power of two as scale (OCP
Microscaling Formats v1.0, 2023). NVFP4 has blocks of 16 with an E4M3 scale under a float32 scale
of the tensor (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.quantizers.config import (
    ActivationSettings,
    GroupSize,
    Patterns,
    Shapes,
    require_groups,
    settings,
)
from qbench.quantizers.formats import BLOCK_FORMATS, WHOLE_ROW, QuantFormat, shared_by
from qbench.quantizers.registry import register
from qbench.records import UNQUANTIZED_BITS, Part

BITS = (8, 6, 4)


@settings
class FakeQuantized(ActivationSettings):
    """Rounds the inputs of linear layers to ``format``. A subclass gives it, and ``scheme``."""

    backend: ClassVar[str] = "activation_inputs"

    ignore: Annotated[
        Patterns,
        Field(
            description="layers whose inputs stay unquantized: parts of their names, such as "
            "down_proj, or patterns over full names, such as '*.o_proj'",
        ),
    ] = ()

    @property
    @abstractmethod
    def format(self) -> QuantFormat: ...

    @property
    @abstractmethod
    def scheme(self) -> str:
        """The format in the field's words: ``int8 per token``."""

    @property
    def precision(self) -> Part:
        return Part(bits=self.format.num_bits, scheme=self.scheme, simulated=True)

    @property
    def needs_calibration(self) -> bool:
        return not self.format.dynamic

    @property
    def batch_invariant(self) -> bool:
        return not self.format.one_of_tensor

    def check_layers(self, shapes: Shapes) -> None:
        if (size := self.format.group_size) != WHOLE_ROW:
            counts = {name: columns for name, (_, columns) in self.quantized(shapes).items()}
            require_groups(self.name, counts, size, "inputs")


WHOLE: dict[str, Any] = {"group_size": WHOLE_ROW}  # per tensor or static there are no groups
FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True, **WHOLE}


@register("fp8-{per}", "fp8 e4m3 inputs, per {per}", per=("token", "tensor", "static"), **FP8)
@register(
    "int{num_bits}-{per}", "int{num_bits} inputs, per {per}",
    num_bits=BITS, type="int", per=("tensor", "static"), **WHOLE,
)  # fmt: skip
@register(
    "int{num_bits}-token", "int{num_bits} inputs, per token", num_bits=BITS, type="int", per="token"
)
@settings
class Scaled(FakeQuantized):
    """Integers, as compressed-tensors rounds them, or E4M3, times a float32 scale.

    ``per`` token: a scale for each token, or for each group along it, from its own values: nothing
    is clipped. tensor: one scale for a layer's whole input, so that every token of a batch depends
    on all others. static: one scale per layer, fixed on calibration text: the cheapest in hardware,
    and the case of the literature on outliers (Bondarenko et al. 2021, 2023).
    """

    num_bits: Literal[8, 6, 4]
    type: Literal["int", "float"]
    per: Literal["token", "tensor", "static"]
    symmetric: Annotated[
        bool, Field(description="false: levels from the smallest to the largest value, and 0")
    ] = True
    group_size: Annotated[
        GroupSize, Field(description="values along a token that share a scale; -1 is all of them")
    ] = WHOLE_ROW

    @property
    def format(self) -> QuantFormat:
        strategy: Literal["token", "tensor"] = "token" if self.per == "token" else "tensor"
        return QuantFormat(
            num_bits=self.num_bits,
            type=self.type,
            symmetric=self.symmetric,
            strategy=strategy if self.group_size == WHOLE_ROW else "group",
            group_size=self.group_size,
            dynamic=self.per != "static",
        )

    @property
    def scheme(self) -> str:
        per = {
            "token": "per token" if self.group_size == WHOLE_ROW else shared_by(self.group_size),
            "tensor": "per tensor, dynamic",
            "static": "per tensor, static",
        }[self.per]
        return f"{self.format.words} {per}{self.format.sides}"


@register("mxfp{num_bits}-token", "MXFP{num_bits} inputs, blocks of 32", num_bits=(8, 4),
          block=32)  # fmt: skip
@register("nvfp4-token", "NVFP4 inputs: e2m1 in blocks of 16, e4m3 scales", num_bits=4, block=16)
@settings
class BlockFloatInputs(FakeQuantized):
    """E4M3 or E2M1 in blocks along a token. Of MX formats a power of two is the scale: values
    beyond the largest element are clipped to it, as the specification has it. Of NVFP4 each block's
    scale is E4M3 times the layer's."""

    num_bits: Literal[4, 8]
    block: Literal[16, 32]

    @property
    def format(self) -> QuantFormat:
        return BLOCK_FORMATS[self.name.removesuffix("-token")]

    @property
    def scheme(self) -> str:
        of_layer = "" if self.format.dynamic else ", tensor scale static"
        return f"{self.name.removesuffix('-token')} in blocks of {self.block}{of_layer}"


@register("rounding-noise", "noise of rounding after each layer: KL's noise floor")
@settings
class RoundingNoise(ActivationSettings):
    """Adds noise of the size of rounding to the output of each decoder layer."""

    backend: ClassVar[str] = "noise_floor"
    ignore: ClassVar[tuple[str, ...]] = ("*",)  # the inputs of linear layers stay unquantized

    @property
    def precision(self) -> Part:
        return Part(bits=UNQUANTIZED_BITS, scheme="rounding noise of the dtype after each layer")
