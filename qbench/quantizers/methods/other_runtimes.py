"""Settings of a column that another runtime scores: any model class of lm-eval, with its arguments.
``qbench.evaluation.llamacpp`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import Runtime, WeightSettings, settings
from qbench.quantizers.registry import register
from qbench.records import UNQUANTIZED_BITS

NOT_HERE = ("hf", "hf-auto", "huggingface", "gguf", "ggml")  # columns of their own do it better


@register(
    "lm-eval",
    "any other runtime by its class in lm-eval: vllm, sglang, local-completions, …; not audited",
    ignore=((),),
    compute_dtype="bfloat16",
)
@settings
class LmEvalModel(WeightSettings):
    """What runs behind it is not seen: its scores are paired with the unquantized model's by
    document, nothing is audited, and there is no KL."""

    method: ClassVar[str] = "lm-eval"
    title: ClassVar[str] = "lm-eval model"
    prequantized: ClassVar[bool] = True
    runtime: ClassVar[Runtime] = "lm-eval"

    model: str = Field("", description="lm-eval's name of the class, as lm_eval --model")
    args: dict[str, Any] = Field(
        default_factory=dict, description="its arguments, as lm_eval --model_args"
    )
    bits: float = Field(
        UNQUANTIZED_BITS, ge=1, le=32,
        description="of a weight, as tables show it; not counted by qbench",
    )  # fmt: skip
    num_bits = property(lambda self: self.bits)
    scheme = property(lambda self: f"as {self.model} runs it")
    note = property(lambda self: f"lm-eval's {self.model}, not audited")

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if lm-eval has no class ``model``; neither argument is read."""
        import lm_eval.models  # registers its names; imports no torch

        names = sorted(set(lm_eval.api.registry.model_registry.keys()) - set(NOT_HERE))
        if self.model not in names:
            raise RecipeError(
                f"lm-eval: model {self.model!r} is unknown; known: {', '.join(names)}"
            )
