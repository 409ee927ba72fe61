"""Hadamard rotation (QuaRot, Ashkboos et al. 2024): outliers spread over all channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.errors import RecipeError
from qbench.quantizers.config import SETTINGS, KVCacheSettings, Progress, TransformSettings
from qbench.quantizers.names import TRANSFORMS
from qbench.quantizers.outliers.classes import require_known
from qbench.quantizers.outliers.orders import factors, no_matrix

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Rotation(TransformSettings):
    """The residual stream in another basis, by a Hadamard matrix with random signs.

    Norms' weights go into the layers after them; embeddings, linear layers and the LM head are
    rotated offline. The paper's Hadamard across heads before o_proj is left out: o_proj sees
    values that are rotated within their heads.
    """

    method: ClassVar[str] = "rotation"

    seed: Annotated[
        int, Field(ge=0, lt=2**63, description="of the signs in front of the Hadamard matrix")
    ] = 0
    values: Annotated[
        bool, Field(description="rotate values within each head: v_proj and o_proj, offline")
    ] = True
    online: Annotated[
        bool, Field(description="rotate the input of down_proj while the model runs")
    ] = True
    queries_keys: Annotated[
        bool,
        Field(
            description="rotate queries and keys after RoPE while the model runs, for a quantized "
            "KV cache"
        ),
    ] = False

    @property
    def name(self) -> str:
        return self.method

    def check(self, config: Mapping[str, Any], device: str) -> None:
        require_known(config, self.name)
        for width, needed in (("hidden_size", True), ("intermediate_size", self.online)):
            size = config.get(width)
            if needed and isinstance(size, int) and size > 0 and factors(size) is None:
                raise RecipeError(f"outliers: {self.name}: {no_matrix(width, size)}")

    def require_fit(self, kv: KVCacheSettings | None) -> None:
        if self.queries_keys and getattr(kv, "before_rope", False):
            raise RecipeError(
                "outliers: rotation: queries_keys rotates keys after RoPE, and kv: "
                f"{kv.name} keeps them before it; set one of queries_keys and before_rope to false"
            )
        if self.queries_keys and kv is None:
            raise RecipeError(
                "outliers: rotation: queries_keys changes nothing without a quantized KV cache; "
                "add kv, or leave it out"
            )

    def calibrate(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> dict[str, Tensor]:
        from qbench.quantizers.outliers.rotating import signs

        return signs(model, self)

    def treat(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        from qbench.quantizers.outliers.rotating import rotate

        rotate(model, self, tensors["signs"])


TRANSFORMS.register(
    "rotation", Rotation, "the residual stream in a Hadamard basis, QuaRot's: outliers spread out"
)
