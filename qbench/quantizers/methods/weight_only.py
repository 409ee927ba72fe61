"""Settings of round to nearest, GPTQ, bitsandbytes and HQQ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qbench.quantizers.config import GroupSize, Shapes, WeightSettings, settings
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.registry import register
from qbench.records import Part, Precision

BNB_BLOCK = 64  # the library's, for 4 bits: consecutive weights of the flattened matrix
BITS = (2, 3, 4, 8)


@settings
class Grouped(WeightSettings):
    """Base of methods whose weights share scales in groups, along a row (``axis`` 1) or across rows
    (0). ``group_size`` None is the largest of ``sizes`` that divides every layer of a model."""

    sizes: ClassVar[tuple[int, ...]] = (128, 64, 32, 16, 8, WHOLE_ROW)
    axis: ClassVar[int] = 1
    misfit: ClassVar[str] = "without group_size one is taken that fits every layer, or set {ignore}"
    group_size: GroupSize | None = None

    def fitted(self, shapes: Shapes) -> Self:
        """Return the settings with a group size: the given one, or the largest that divides all."""
        if self.group_size is not None:
            return self
        counts = [shape[self.axis] for shape in self.quantized(shapes).values()]
        fits = (n for n in self.sizes if n == WHOLE_ROW or not any(c % n for c in counts))
        return replace(self, group_size=next(fits, self.sizes[0]))

    def group_length(self, columns: int) -> int:
        """Return the group size; of whole rows ``columns``, their weights."""
        size = self.group_size or self.sizes[0]
        return columns if size == WHOLE_ROW else size

    @property
    def grouping(self) -> str:
        """Return how weights share scales, in words: ``in groups of 128``, or ``per row``."""
        size = self.group_size or self.sizes[0]
        return "per row" if size == WHOLE_ROW else f"in groups of {size}"

    @property
    def blocks(self) -> tuple[int, int]:
        """Return (1, group size); (group size, 1) for groups across rows; (1, 1) if no size is
        fixed or the group is the whole row."""
        size = 1 if self.group_size in (None, WHOLE_ROW) else self.group_size
        return (1, size) if self.axis else (size, 1)


@settings
class GroupedIntegers(Grouped):
    """Integers, with a float16 scale and a zero point in a byte for each group."""

    num_bits: Literal[2, 3, 4, 8]
    group_size: GroupSize | None = Field(
        None, description="weights that share a scale, along a row; -1 is the whole row; default: "
        "128, or the largest of 64, 32, 16, 8 that divides every layer's inputs",
    )  # fmt: skip

    scheme = property(lambda self: f"int{self.num_bits} {self.grouping}")

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight of a group's float16 scale and 8-bit zero."""
        return (16 + 8) / self.group_length(columns)


@settings
class EvenlySpaced(GroupedIntegers):
    """Integers rounded here, symmetric or not."""

    symmetric: bool = Field(
        True, description="zero point fixed in the middle; false: one for each group"
    )

    @property
    def format(self) -> QuantFormat:
        """Return the number format of the codes and their scales."""
        strategy: Literal["token", "group"] = "token" if self.group_size == WHOLE_ROW else "group"
        return QuantFormat(num_bits=self.num_bits, symmetric=self.symmetric, strategy=strategy,
                           group_size=self.group_size)  # fmt: skip

    @property
    def scheme(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"int{self.num_bits} {kind} {self.grouping}"


@register(
    "rtn-{num_bits}bit", "round to nearest, {num_bits} bits: the baseline; seconds", num_bits=BITS
)
@settings
class Rtn(EvenlySpaced):
    """Round to nearest: the simplest method, which others must beat."""

    method: ClassVar[str] = "rtn"
    backend: ClassVar[str] = "packed"
    title: ClassVar[str] = "Round to nearest"
    note: ClassVar[str] = "round to nearest"
    of_ends: ClassVar[bool] = True


@settings
class ColumnOrder(EvenlySpaced):
    """GPTQ (Frantar et al. 2022): column by column, each error passed on to the columns left."""

    needs_calibration = True

    desc_act: bool = Field(False, description="columns in the order of falling activation size")
    group_aware: bool | None = Field(
        None, description="that order, but only within groups and among groups; default: true, "
        "unless desc_act is true or a group is the whole row",
    )  # fmt: skip

    @model_validator(mode="after")
    def _one_order(self) -> Self:
        if self.desc_act and self.group_aware:
            raise ValueError(
                "desc_act and group_aware are two orders of the same columns; set one of them"
            )
        if self.group_aware and self.group_size == WHOLE_ROW:
            raise ValueError("group_aware is an order of groups; set a group_size")
        return self

    @property
    def order(self) -> Literal["activation", "group-aware", "column"]:
        """Return the order in which columns are quantized."""
        if self.desc_act:
            return "activation"
        whole_row = self.group_size == WHOLE_ROW
        return "column" if self.group_aware is False or whole_row else "group-aware"

    def fitted(self, shapes: Shapes) -> Self:
        """Return the settings with a group size, and with ``group_aware`` decided."""
        sized = super().fitted(shapes)
        return replace(sized, group_aware=sized.order == "group-aware")

    @property
    def scheme(self) -> str:
        return f"{super().scheme}, {self.order} order"

    @property
    def error_bound(self) -> float:
        """Return twice the bound of rounding: GPTQ trades weight error for output error; relative
        errors up to 1.2 were seen at 2 bits, where rounding gives 0.5."""
        return 2 * super().error_bound


@register(
    "gptq-{num_bits}bit", "GPTQ, {num_bits} bits; calibrated, minutes on a CPU", num_bits=BITS
)
@settings
class Gptq(ColumnOrder):
    """GPTQ by our own solver. The defaults are GPTQModel 7.6's: symmetric, groups of 128,
    group-aware column order, damping of 5 % of the Hessian's mean diagonal."""

    method: ClassVar[str] = "gptq"
    backend: ClassVar[str] = "gptq"
    title: ClassVar[str] = "GPTQ"

    damp: float = Field(
        0.05, gt=0, lt=1, description="added to the Hessian's diagonal, in units of its mean"
    )
    true_sequential: bool = Field(
        True, description="inside a block, each layer sees inputs changed by the quantization of "
        "earlier layers",
    )  # fmt: skip
    batch_size: int = Field(8, ge=1, le=65536, description="calibration samples in one forward")


class Bnb(WeightSettings):
    """Quantized by the library bitsandbytes."""

    method: ClassVar[str] = "bnb"
    backend: ClassVar[str] = "bnb"
    title: ClassVar[str] = "BNB"
    note: ClassVar[str] = "bitsandbytes"
    requirements = ("bitsandbytes",)


@register("bnb-4bit", "bitsandbytes nf4 or fp4, blocks of 64; seconds", num_bits=4)
@settings
class Bnb4(Bnb):
    """Blocks of 64 weights: 16 levels of a fixed table times the largest of the block."""

    num_bits: Literal[4]
    quant_type: Literal["nf4", "fp4"] = Field(
        "nf4", description="table of levels: normal-float or floating point"
    )
    double_quant: bool = Field(False, description="also quantize the blocks' scales, to 8 bits")
    scheme = property(lambda self: f"{self.quant_type} in blocks of {BNB_BLOCK}")

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight of a block's float32 scale, at most."""
        return 32 / BNB_BLOCK


@register("bnb-8bit", "bitsandbytes LLM.int8, activations quantized too; seconds", num_bits=8)
@settings
class Bnb8(Bnb):
    """LLM.int8: rows of int8 weights, int8 activations, outlier columns apart. Outlier columns are
    chosen over the whole batch, so a score depends on its batch-mates, and a token's logits on
    later tokens. Products are in float16, whatever the dtype."""

    batch_invariant = False
    agreement: ClassVar = {
        "bfloat16": (5e-3, 5e-2), "float16": (2e-3, 5e-2), "float32": (2e-3, 5e-2),
    }  # fmt: skip
    precision: ClassVar[Precision] = Precision(
        weights=Part(bits=8, scheme="int8 per row"),
        activations=Part(bits=8, scheme="int8 per token, outlier columns apart"),
    )

    num_bits: Literal[8]
    threshold: float = Field(  # at most the largest activation of float16
        6.0, ge=0, le=65536,
        description="activations above this are outliers, computed unquantized; 0: no outliers",
    )  # fmt: skip

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight of a row's float32 scale."""
        return 32 / columns


@register(
    "hqq-{num_bits}bit",
    "half-quadratic quantization by hqq, {num_bits} bits; seconds",
    num_bits=BITS,
)
@settings
class Hqq(Grouped):
    """Half-quadratic quantization (Badri & Shaji 2023), by the hqq library: zero points fitted, no
    calibration. Zeros are whole numbers only at 4 bits, as in the library."""

    method: ClassVar[str] = "hqq"
    backend: ClassVar[str] = "hqq"
    title: ClassVar[str] = "HQQ"
    of_ends: ClassVar[bool] = True
    requirements = ("hqq",)
    sizes: ClassVar[tuple[int, ...]] = (64, 32, 16, 8)

    num_bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int, Field(ge=8, le=65536, multiple_of=8)] | None = Field(
        None, description="weights that share a scale and a zero along `axis`, a multiple of 8; "
        "default: 64, or the largest of 32, 16, 8 that divides every layer",
    )  # fmt: skip
    axis: Literal[0, 1] = Field(1, description="1: groups along a row; 0: groups across rows")
    optimize: bool = Field(True, description="fit the zero points; without it, plain rounding")

    @property
    def scheme(self) -> str:
        """Return the scheme in the field's words: ``int4 in groups of 64``; with float32 also that
        scales and zeros are."""
        across = "" if self.axis == 1 else " across rows"
        wide = ", float32 scales and zeros" if self.compute_dtype == "float32" else ""
        return f"int{self.num_bits} in groups of {self.group_length(0)}{across}{wide}"

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight of a scale and zero, and at 3 bits of unused ones."""
        wide = 32 if self.compute_dtype == "float32" else 16  # of a scale, and of a zero
        size, padding = self.group_length(columns), 0.0
        if self.num_bits == 3:
            # ten codes in 32 bits, those of one place in all groups or of one group
            together = rows * columns // size if self.axis else size
            padding = 32 * math.ceil(together / 10) / together - 3
        return 2 * wide / size + padding
