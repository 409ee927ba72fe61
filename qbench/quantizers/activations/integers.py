"""Activations as integers: evenly spaced levels. Imports no torch.

Symmetric: 2^bits − 1 levels, 0 in the middle; asymmetric: 2^bits levels from the smallest value
to the largest, with a zero point.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.activations.simulated import Percentile
from qbench.quantizers.config import SETTINGS, WHOLE_ROW, Grid, GroupSize, strategy
from qbench.quantizers.names import ACTIVATIONS
from qbench.quantizers.products.activations import Multiplied


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class _Integers(Multiplied):
    per: ClassVar[str]
    method: ClassVar[str] = "int"

    bits: Annotated[int, Field(ge=2, le=8)]
    symmetric: bool

    @property
    def name(self) -> str:
        return f"int{self.bits}-{self.per}{'' if self.symmetric else '-asymmetric'}"

    @property
    def grid(self) -> Grid:
        return Grid(kind="symmetric" if self.symmetric else "asymmetric", bits=self.bits)

    def _scheme(self, per: str) -> str:
        return f"int{self.bits} {per}{'' if self.symmetric else ', asymmetric'}"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class IntToken(_Integers):
    """One scale a token, or one for each group along it, from its own values: nothing is
    clipped."""

    per: ClassVar[str] = "token"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "group"

    group_size: Annotated[
        GroupSize, Field(description="values along a token that share a scale; -1 is all of them")
    ] = WHOLE_ROW

    @property
    def group(self) -> int:
        return self.group_size

    @property
    def scheme(self) -> str:
        whole = self.group_size == WHOLE_ROW
        return self._scheme("per token" if whole else strategy(self.group_size))


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class IntTensor(_Integers):
    """One scale for everything that a layer takes in at once: every token of a batch depends on
    all others, so that scores depend on batch-mates and on the future."""

    per: ClassVar[str] = "tensor"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "tensor"

    @property
    def scheme(self) -> str:
        return self._scheme("per tensor, dynamic")


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class IntStatic(_Integers):
    """One scale a layer, fixed on calibration text: the cheapest in hardware, and the case of the
    literature on outliers (Bondarenko et al. 2021, 2023)."""

    per: ClassVar[str] = "static"
    scale_of: ClassVar[Literal["group", "tensor", "text"]] = "text"

    percentile: Percentile = 100.0

    @property
    def calibrated_share(self) -> float:
        return self.percentile

    @property
    def scheme(self) -> str:
        share = "" if self.percentile == 100 else f" ({self.percentile:g} %)"
        return self._scheme(f"per tensor, static{share}")


for _bits in (8, 6, 4):
    for _symmetric in (True, False):
        for _kind, _line in (
            (IntToken, "one scale a token, from its own values"),
            (IntTensor, "one scale a batch; scores depend on batch-mates"),
            (IntStatic, "one scale a layer, fixed on calibration text"),
        ):
            _suffix = "" if _symmetric else "-asymmetric"
            ACTIVATIONS.register(
                f"int{_bits}-{_kind.per}{_suffix}",
                _kind,
                f"int{_bits}{'' if _symmetric else ' with a zero point'}, {_line}",
                bits=_bits,
                symmetric=_symmetric,
            )
