"""The checkpoint itself: the baseline of every damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.names import register
from qbench.quantizers.quantizer import SETTINGS, Evidence, Made, Progress, Quantizer
from qbench.record import Precision

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Unquantized(Quantizer):
    """Nothing but a cast."""

    method: ClassVar[str] = "none"
    title: ClassVar[str] = "Unquantized"
    threads: ClassVar[int] = 1
    leave_out: ClassVar[tuple[str, ...]] = ()

    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        Field(description="dtype of weights and activations"),
    ] = "bfloat16"

    @property
    def name(self) -> str:
        return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[self.dtype]

    @property
    def compute_dtype(self) -> str:  # type: ignore[override]
        return self.dtype

    @property
    def precision(self) -> Precision:
        return Precision()

    def make(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> Made:
        return Made(tensors={}, note=f"unquantized, {self.dtype}")

    def apply(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
        return model

    def evidence(self, model: nn.Module) -> Evidence:
        return Evidence()


register("bf16", Unquantized, "unquantized, bfloat16", dtype="bfloat16")
register("fp16", Unquantized, "unquantized, float16", dtype="float16")
register("fp32", Unquantized, "unquantized, float32 (for CPUs)", dtype="float32")
