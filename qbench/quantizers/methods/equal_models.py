"""Settings of SmoothQuant and Hadamard rotation: an equal model that is easier to quantize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import Settings, settings
from qbench.quantizers.hadamard import factors
from qbench.quantizers.methods.kv_formats import head_dim
from qbench.quantizers.registry import register

# Their forwards were read: a block is x + o_proj(attention(norm(x))), then
# x + down_proj(act(gate_proj(norm(x))) · up_proj(norm(x))), with RMS norms whose weight is a plain
# factor. By ``model_type``; what flash-linear-attention's transformers become is among them.
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def require_known(config: Mapping[str, Any], transform: str) -> None:
    """Raise RecipeError, naming ``transform``, if ``model_type`` of ``config`` is not in KNOWN."""
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise RecipeError(
            f"transform: {transform}: the blocks of {kind} models are not supported; supported: "
            f"{', '.join(KNOWN)}; leave the transform out"
        )


Smoothed = Literal["attention", "mlp", "o_proj", "down_proj"]


@register("smoothquant", "activation outliers moved into weights by a scale per channel")
@settings
class SmoothQuant(Settings):
    """Divides inputs of linear layers by a scale per channel, and multiplies their weights by it.
    The scales of q, k, v and of gate and up go into the norm before them, those of o_proj into
    v_proj, those of down_proj into up_proj: attention weights and the gate multiply a channel of
    values, or of up_proj, without mixing it with others."""

    kind: ClassVar = "transform"
    backend: ClassVar[str] = "smoothquant"
    needs_calibration = True

    alpha: float = Field(
        0.5, ge=0, le=1, description="how much of the outliers moves to the weights: 0 none, 1 all"
    )
    layers: tuple[Smoothed, ...] = Field(
        ("attention", "mlp", "o_proj", "down_proj"),
        strict=False,
        description="whose inputs: attention is q, k, v, mlp is gate and up, as in the paper; "
        "o_proj and down_proj through v_proj and up_proj",
    )

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError for a model whose blocks are not known."""
        require_known(config, self.name)


@register("rotation", "the residual stream in a Hadamard basis, as QuaRot: outliers spread out")
@settings
class Rotation(Settings):
    """Rotates the residual stream by a Hadamard matrix with random signs. Norms' weights go into
    the layers after them; embeddings, linear layers and LM head are rotated offline. The paper's
    Hadamard across heads before o_proj is left out: o_proj's input is rotated within heads."""

    kind: ClassVar = "transform"
    backend: ClassVar[str] = "rotation"

    seed: int = Field(0, ge=0, lt=2**63, description="of the signs in front of the Hadamard matrix")
    online: bool = Field(True, description="rotate the input of down_proj while the model runs")

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError for unknown blocks, or a width without a Hadamard matrix."""
        require_known(config, self.name)
        widths = {"hidden_size": config.get("hidden_size"), "head_dim": head_dim(config)}
        if self.online:
            widths["intermediate_size"] = config.get("intermediate_size")
        for width, size in widths.items():
            if isinstance(size, int) and size > 0 and factors(size) is None:
                out = "leave the transform out"
                remedy = "set online: false" if width == "intermediate_size" else out
                raise RecipeError(
                    f"transform: {self.name}: {width} {size:,}: no Hadamard matrix of that order "
                    f"by Sylvester's and Paley's constructions; {remedy}"
                )
