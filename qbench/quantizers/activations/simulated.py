"""Activations rounded to a format and multiplied in the model's dtype. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers.config import (
    SETTINGS,
    WHOLE_ROW,
    ActivationEvidence,
    ActivationSettings,
    Grid,
    Progress,
    pattern,
)
from qbench.records import Part

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration

Percentile = Annotated[
    float,
    Field(
        ge=50,
        le=100,
        description="per cent of the values on calibration text that the range holds, what is "
        "beyond is clipped; 100: from the smallest to the largest",
    ),
]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Simulated(ActivationSettings):
    """A format, and what shares a scale.

    ``scale_of``: every group of values along a token, the whole input (all tokens of a batch), or
    fixed from calibration text.
    """

    scale_of: ClassVar[Literal["group", "tensor", "text"]]

    ignore: Annotated[
        tuple[Annotated[str, AfterValidator(pattern)], ...],
        Field(
            strict=False,
            description="layers whose inputs stay unquantized: parts of their names, such as "
            "down_proj, or patterns over whole names, such as '*.o_proj'",
        ),
    ] = ()

    @property
    @abstractmethod
    def grid(self) -> Grid: ...

    @property
    @abstractmethod
    def scheme(self) -> str:
        """In the field's words: ``int8 per token``."""

    @property
    def group(self) -> int:
        """Values along a token that share a scale; −1: all."""
        return WHOLE_ROW

    @property
    def calibrated_share(self) -> float:
        """Per cent of the calibration text's values that a fixed range holds."""
        return 100.0

    @property
    def precision(self) -> Part:
        return Part(bits=self.grid.bits, scheme=self.scheme, simulated=True)

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        return self.scale_of == "text"

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        return self.scale_of != "tensor"

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.scale_of != "tensor"

    def check(self, config: Mapping[str, Any], device: str) -> None:
        for width in ("hidden_size", "intermediate_size"):
            size = config.get(width)
            if self.group != WHOLE_ROW and isinstance(size, int) and size % self.group:
                raise RecipeError(f"{self.name}: {self._not_whole(width, size)}")

    def calibrate(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> dict[str, Tensor]:
        if not self.needs_calibration:
            return {}
        from qbench.quantizers.activations.ranges import ranges

        assert calibration is not None
        return ranges(
            model,
            calibration,
            percentile=self.calibrated_share,
            symmetric=self.grid.kind != "asymmetric",
            spared=self.ignore,
            progress=progress,
        )

    def install(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        from qbench.quantizers.activations import inputs
        from qbench.quantizers.activations.quantize import by_group, by_tensor

        modules = inputs.multipliers(model, self.ignore)
        for name, module in modules.items():
            if self.group != WHOLE_ROW and module.in_features % self.group:  # type: ignore[operator]
                raise QuantizationError(
                    f"{self.name}: {self._not_whole(name, module.in_features)}"  # type: ignore[arg-type]
                )
        grid, size = self.grid, self.group
        if self.scale_of == "tensor":
            inputs.install(model, modules, lambda x, _: by_tensor(x, grid, size))
        else:
            fixed = inputs.fixed_ranges(tensors, grid)
            inputs.install(model, modules, lambda x, f: by_group(x, grid, size, f), fixed)

    def evidence(self, model: nn.Module) -> Mapping[str, ActivationEvidence]:
        from qbench.quantizers.activations.inputs import evidence

        return evidence(model, self.grid, self.group, self.scale_of)

    def _not_whole(self, what: str, size: int) -> str:
        return (
            f"{what} is {size}, no multiple of the {self.group} values that share a scale; leave "
            "out what does not fit (ignore), or choose another format"
        )
