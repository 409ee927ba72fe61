"""The settings of the methods for weights: round to nearest, bitsandbytes, HQQ, GPTQ. No torch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from qbench.quantizers.config import (
    SETTINGS,
    WHOLE_ROW,
    WIDEST,
    GroupSize,
    WeightSettings,
    strategy,
)
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.names import register
from qbench.records import Part, Precision

BNB_BLOCK = 64  # the library's, for 4 bits: consecutive weights of the flattened matrix


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Grouped(WeightSettings):
    """Evenly spaced levels, a float16 scale and a zero point in a byte for each group."""

    num_bits: Literal[2, 3, 4, 8]
    group_size: GroupSize = 128
    symmetric: Annotated[
        bool, Field(description="zero point fixed in the middle; else one for each group")
    ] = False

    @property
    def scheme(self) -> str:
        return f"int{self.num_bits} {strategy(self.group_size)}"

    def shared_bits(self, rows: int, columns: int) -> float:
        return (16 + 8) / self.group_length(columns)

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        self.require_whole_groups(name, columns, "inputs", self.group_length(columns))


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Rtn(Grouped):
    """Round to nearest. The yardstick that every method must beat."""

    method: ClassVar[str] = "rtn"
    backend: ClassVar[str] = "packed"
    title: ClassVar[str] = "Round to nearest"
    note: ClassVar[str] = "round to nearest"


class Bnb(WeightSettings):
    """By the library bitsandbytes."""

    method: ClassVar[str] = "bnb"
    backend: ClassVar[str] = "bnb"
    title: ClassVar[str] = "BNB"
    note: ClassVar[str] = "bitsandbytes"
    requirements = ("bitsandbytes",)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Bnb4(Bnb):
    """Blocks of 64 weights: 16 levels of a fixed table times the largest of the block."""

    num_bits: Literal[4]
    quant_type: Annotated[
        Literal["nf4", "fp4"],
        Field(description="table of levels: normal-float or floating point"),
    ] = "nf4"
    double_quant: Annotated[
        bool, Field(description="also quantize the blocks' scales, to 8 bits")
    ] = False

    @property
    def scheme(self) -> str:
        return f"{self.quant_type} in blocks of {BNB_BLOCK}"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / BNB_BLOCK


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Bnb8(Bnb):
    """LLM.int8: rows of int8 weights, int8 activations, outlier columns apart.

    Outlier columns are chosen over the whole batch, so a score depends on its batch-mates, and a
    token's logits on later tokens.
    """

    batch_invariant = False

    scheme: ClassVar[str] = "int8 per row"
    num_bits: Literal[8]
    threshold: Annotated[
        float,
        Field(
            ge=0,
            le=65536,  # the largest activation of float16
            description="activations above this are outliers, computed unquantized; 0: no outliers",
        ),
    ] = 6.0

    @property
    def precision(self) -> Precision:
        return Precision(
            weights=Part(bits=8, scheme=self.scheme),
            activations=Part(bits=8, scheme="int8 per token, outlier columns apart"),
        )

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / columns

    def agreement(self, dtype: str) -> tuple[float, float]:
        """Products are float16 whatever the dtype, and activations are rounded to 127 steps."""
        return (5e-3 if dtype == "bfloat16" else 2e-3), 5e-2


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Hqq(WeightSettings):
    """Half-quadratic quantization (Badri & Shaji 2023), by the hqq library: zero points fitted, no
    calibration. Zeros are whole numbers at 4 bits alone, as the library has it."""

    method: ClassVar[str] = "hqq"
    backend: ClassVar[str] = "hqq"
    title: ClassVar[str] = "HQQ"
    requirements = ("hqq",)

    num_bits: Literal[2, 3, 4, 8]
    group_size: Annotated[
        int,
        Field(
            ge=8,
            le=WIDEST,
            multiple_of=8,
            description="weights that share a scale and a zero along `axis`; a multiple of 8",
        ),
    ] = 64
    axis: Annotated[
        Literal[0, 1], Field(description="1: groups along a row; 0: groups across rows")
    ] = 1
    optimize: Annotated[
        bool, Field(description="fit the zero points; without it, plain rounding")
    ] = True

    @property
    def scheme(self) -> str:
        return f"int{self.num_bits} in groups of {self.group_size}" + (
            "" if self.axis == 1 else " across rows"
        )

    def shared_bits(self, rows: int, columns: int) -> float:
        wide = 32 if self.compute_dtype == "float32" else 16  # of a scale, and of a zero
        padding = 0.0
        if self.num_bits == 3:
            # ten codes in 32 bits, those of one place in all groups or of one group
            together = rows * columns // self.group_size if self.axis else self.group_size
            padding = 32 * math.ceil(together / 10) / together - 3
        return 2 * wide / self.group_size + padding

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        features, what = (columns, "inputs") if self.axis else (rows, "outputs")
        self.require_whole_groups(name, features, what, self.group_size)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Gptq(Grouped):
    """GPTQ (Frantar et al. 2022): column by column, each error passed on to the columns left."""

    method: ClassVar[str] = "gptq"
    backend: ClassVar[str] = "gptq"
    title: ClassVar[str] = "GPTQ"
    needs_calibration = True

    symmetric: Annotated[
        bool, Field(description="zero point fixed in the middle; else one for each group")
    ] = True
    desc_act: Annotated[
        bool, Field(description="columns in the order of falling activation size")
    ] = False
    group_aware: Annotated[
        bool,
        Field(
            description="that order, but only within groups and among groups (GPTQModel's); not "
            "with desc_act"
        ),
    ] = False
    damp: Annotated[
        float,
        Field(gt=0, lt=1, description="added to the Hessian's diagonal, in units of its mean"),
    ] = 0.01
    true_sequential: Annotated[
        bool,
        Field(
            description="inside a block, each layer sees inputs changed by the quantization of "
            "earlier layers"
        ),
    ] = True
    batch_size: Annotated[
        int, Field(ge=1, le=65536, description="calibration samples in one forward")
    ] = 8

    @model_validator(mode="after")
    def _one_order(self) -> Gptq:
        if self.desc_act and self.group_aware:
            raise ValueError(
                "desc_act and group_aware are two orders of the same columns; set one of them"
            )
        if self.group_aware and self.group_size == WHOLE_ROW:
            raise ValueError("group_aware is an order of groups; set a group_size")
        return self

    def error_bound(self) -> float:
        """Twice that of rounding: GPTQ trades weight error for output error; relative errors up
        to 1.2 were seen at 2 bits, where rounding gives 0.5."""
        return 2 * super().error_bound()


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class ScaledWeights(WeightSettings):
    """Codes of 8 bits times a float32 scale, so that the largest magnitude is the largest code:
    nothing is clipped. FP8 is E4M3 without infinities, largest 448 (Micikevicius et al., FP8
    formats, 2022)."""

    backend: ClassVar[str] = "scaled_linear"
    note: ClassVar[str] = "round to nearest"
    num_bits: Literal[8]
    type: Literal["int", "float"]
    per: Literal["row", "tensor"]

    @property
    def method(self) -> str:
        return "int8" if self.type == "int" else "fp8"

    @property
    def title(self) -> str:
        return "Int8 weights" if self.type == "int" else "FP8 weights"

    @property
    def name(self) -> str:
        return f"{self.method}-{self.per}"

    @property
    def scheme(self) -> str:
        return f"{'int8' if self.type == 'int' else 'fp8 e4m3'} per {self.per}"

    @property
    def format(self) -> QuantFormat:
        strategy = "token" if self.per == "row" else "tensor"
        return QuantFormat(num_bits=8, type=self.type, strategy=strategy)

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / columns if self.per == "row" else 32 / (rows * columns)


register("bnb-4bit", Bnb4, "bitsandbytes nf4 or fp4, blocks of 64", num_bits=4)
register("bnb-8bit", Bnb8, "bitsandbytes LLM.int8, activations quantized too", num_bits=8)
for _kind, _line in (
    (Gptq, "GPTQ, {} bits, calibrated"),
    (Hqq, "half-quadratic quantization, {} bits, no calibration"),
    (Rtn, "round to nearest in groups, {} bits: the simplest method"),
):
    for _bits in (2, 3, 4, 8):
        register(f"{_kind.method}-{_bits}bit", _kind, _line.format(_bits), num_bits=_bits)
for _name, _type, _per, _line in (
    ("int8-row", "int", "row", "int8, a scale per row"),
    ("fp8-row", "float", "row", "fp8 e4m3, a scale per row"),
    ("fp8-tensor", "float", "tensor", "fp8 e4m3, one scale per matrix"),
):
    register(_name, ScaledWeights, _line, num_bits=8, type=_type, per=_per)
