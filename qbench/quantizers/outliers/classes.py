"""The classes whose blocks treatments of outliers know. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qbench.errors import RecipeError

# Their forwards were read: nothing stands between a block's layers but what ``anatomy`` says. By
# ``model_type`` of config.json; flash-linear-attention's transformer becomes a Llama.
KNOWN = {
    "llama": "LlamaForCausalLM",
    "transformer": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def require_known(config: Mapping[str, Any], treatment: str) -> None:
    """Raise RecipeError, in the name of ``treatment``, for a model of another class."""
    kind = config.get("model_type")
    if kind is not None and kind not in KNOWN:
        raise RecipeError(
            f"outliers: {treatment}: the blocks of {kind} models are not known to it; it knows "
            f"{', '.join(KNOWN)}"
        )
