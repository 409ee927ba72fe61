"""SmoothQuant (Xiao et al. 2022): outliers of activations moved into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.config import SETTINGS, Progress, TransformSettings
from qbench.quantizers.names import TRANSFORMS
from qbench.quantizers.outliers.classes import require_known

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration

Smoothed = Literal["attention", "mlp", "o_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class SmoothQuant(TransformSettings):
    """Inputs of linear layers divided by a scale a channel, their weights multiplied by it.

    The scales of q, k, v and of gate and up go into the norm before them, those of o_proj into
    v_proj, those of down_proj into up_proj. All four keep the function: attention weights and the
    gate multiply a channel of values, or of up_proj, without mixing it with others.
    """

    method: ClassVar[str] = "smoothquant"

    alpha: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="how much of the difficulty moves to the weights: 0 none, 1 all",
        ),
    ] = 0.5
    layers: Annotated[
        tuple[Smoothed, ...],
        Field(
            strict=False,
            description="whose inputs: attention is q, k, v, mlp is gate and up, as in the paper; "
            "o_proj and down_proj through v_proj and up_proj",
        ),
    ] = ("attention", "mlp", "o_proj", "down_proj")
    batch_size: Annotated[
        int, Field(ge=1, le=65536, description="calibration samples in one forward")
    ] = 8

    @property
    def name(self) -> str:
        return self.method

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        return True

    def check(self, config: Mapping[str, Any], device: str) -> None:
        require_known(config, self.name)

    def calibrate(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> dict[str, Tensor]:
        from qbench.quantizers.outliers.smoothing import scales

        assert calibration is not None
        return scales(model, self, calibration, progress)

    def treat(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        from qbench.quantizers.outliers.smoothing import fold

        fold(model, self, tensors)


TRANSFORMS.register(
    "smoothquant", SmoothQuant, "activation outliers moved into weights by a scale a channel"
)
