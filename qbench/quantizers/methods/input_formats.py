"""Settings of activation formats: what the inputs of linear layers are rounded to."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from qbench.quantizers.config import GroupSize, Patterns, Settings, settings
from qbench.quantizers.formats import BLOCK_FORMATS, WHOLE_ROW, QuantFormat, number
from qbench.quantizers.registry import register
from qbench.records import UNQUANTIZED_BITS, Part, Precision

INTEGERS = ("int8", "int6", "int4")
PER = ("token", "tensor", "static")
WHOLE: dict[str, Any] = {"group_size": WHOLE_ROW}  # per tensor or static there are no groups
FLOAT: dict[str, Any] = {"symmetric": True, **WHOLE}


class Activations(Settings):
    """Base of formats for the inputs of linear layers, the LM head's left out."""

    kind: ClassVar = "activations"
    method: ClassVar[str] = "activations"
    title: ClassVar[str] = "activations"


@register("nvfp4-token", "NVFP4 inputs: e2m1 in blocks of 16, e4m3 scales", element="nvfp4",
          per="token", **FLOAT)  # fmt: skip
@register("{element}-token", "{element} inputs, blocks of 32", element=("mxfp8", "mxfp4"),
          per="token", **FLOAT)  # fmt: skip
@register("fp8-{per}", "fp8 e4m3, {per} scales", element="fp8", per=PER, **FLOAT)
@register("{element}-{per}", "{element}, {per} scales", element=INTEGERS, per=PER[1:], **WHOLE)
@register("{element}-token", "{element}, token scales", element=INTEGERS, per="token")
@settings
class RoundedInputs(Activations):
    """Rounds inputs to integers, as compressed-tensors does, or to E4M3 (FP8), times a float32
    scale; or to the block formats of ``formats.BLOCK_FORMATS``.

    ``per`` token: a scale for each token, or for each group along it, from its own values: nothing
    is clipped. tensor: one scale for a layer's whole input, so that every token of a batch depends
    on all others. static: one scale per layer, fixed on calibration text: the cheapest in hardware,
    and the case of the literature on outliers (Bondarenko et al. 2021, 2023)."""

    backend: ClassVar[str] = "activation_inputs"

    element: str
    per: Literal["token", "tensor", "static"]
    symmetric: bool = Field(
        True, description="false: levels from the smallest to the largest value, and 0"
    )
    group_size: GroupSize = Field(
        WHOLE_ROW, description="values along a token that share a scale; -1 is all of them"
    )
    ignore: Patterns = Field(
        (), description="layers whose inputs stay unquantized: parts of their names, such as "
        "down_proj, or patterns over full names, such as '*.o_proj'",
    )  # fmt: skip
    needs_calibration = property(lambda self: not self.format.dynamic)
    batch_invariant = property(lambda self: not self.format.one_of_tensor)
    blocks = property(lambda self: (1, max(1, self.format.group_size)))

    @property
    def format(self) -> QuantFormat:
        """Return the number format to which inputs are rounded."""
        if self.element in BLOCK_FORMATS:
            return BLOCK_FORMATS[self.element]
        in_groups = self.group_size != WHOLE_ROW
        return QuantFormat(
            **number(self.element),
            symmetric=self.symmetric,
            strategy="group" if in_groups else "token" if self.per == "token" else "tensor",
            group_size=self.group_size,
            dynamic=self.per != "static",
        )

    @property
    def precision(self) -> Precision:
        """Return bits and scheme of the inputs, such as ``int8 per token, symmetric``."""
        form = self.format
        if self.element in BLOCK_FORMATS:
            of_layer = "" if form.dynamic else ", tensor scale static"
            scheme = f"{self.element} in blocks of {form.group_size}{of_layer}"
        elif self.per == "token":
            whole = self.group_size == WHOLE_ROW
            per = "per token" if whole else f"in groups of {self.group_size}"
            scheme = f"{form.words} {per}{form.sides}"
        else:
            when = "dynamic" if form.dynamic else "static"
            scheme = f"{form.words} per tensor, {when}{form.sides}"
        return Precision(activations=Part(bits=form.num_bits, scheme=scheme, simulated=True))


@register("rounding-noise", "noise of rounding after each layer: KL's noise floor")
@settings
class RoundingNoise(Activations):
    """Adds noise of the size of rounding to the output of each decoder layer."""

    backend: ClassVar[str] = "noise_floor"
    ignore: ClassVar[tuple[str, ...]] = ("*",)  # the inputs of linear layers stay unquantized
    precision: ClassVar[Precision] = Precision(
        activations=Part(
            bits=UNQUANTIZED_BITS, scheme="rounding noise of the dtype after each layer"
        )
    )
