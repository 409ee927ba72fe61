"""config.json: read with bounds, and held against what a causal language model can say of itself.

Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qbench.errors import CheckpointError

MAX_BYTES = 16 * 2**20  # an index of a large checkpoint has 10 MB, a config.json a few thousand
# Classes that attend to both sides unless config.json says is_decoder (transformers warns so when
# it builds them) ...
ENCODERS = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
# ... and ones that do so by default, under a setting of their own
BIDIRECTIONAL = {
    "xlm": ("causal", True),
    "flaubert": ("causal", True),
    "xlnet": ("attn_type", "uni"),
}
BOTH_SIDES = (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,)))
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
    "n_embd", "n_layer", "n_head", "max_position_embeddings", "n_positions",
)  # fmt: skip
LENGTHS = ("max_position_embeddings", "n_positions")  # may be more than the files hold


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises CheckpointError where it is none, or not a file."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is not a regular file")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path.name} is larger than {MAX_BYTES // 2**20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise CheckpointError(f"{path.name} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of an unquantized causal language model, refused by name for all else."""
    if not (folder / "config.json").exists():
        raise CheckpointError(f"no config.json in {folder}")
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        raise CheckpointError(
            "it is quantized already (quantization_config); name the unquantized checkpoint"
        )
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            "config.json states no model_type; name a checkpoint that transformers or "
            "flash-linear-attention saved"
        )
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        raise CheckpointError(
            f"config.json: tie_word_embeddings {config['tie_word_embeddings']!r}: write true or "
            "false"
        )
    if "transformers_weights" in config:  # would load another file than the ones that are checked
        raise CheckpointError("config.json: transformers_weights is not supported; remove it")
    _require_causal(config)
    return config


def _require_causal(config: dict[str, Any]) -> None:
    """Raise CheckpointError for models that see what comes after a token, or need an encoder."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            f"{kind} is an encoder-decoder model (is_encoder_decoder: true); only causal language "
            "models are scored"
        )
    name, value = BIDIRECTIONAL.get(kind, ("is_decoder", True))
    stated = next((key for key, values in BOTH_SIDES if config.get(key) in values), None)
    heads = config.get("architectures") or []
    masked = isinstance(heads, list) and any(str(head).endswith("ForMaskedLM") for head in heads)
    if kind in ENCODERS or kind in BIDIRECTIONAL:
        both_sides = config.get(name) != value
        remedy = f"; a decoder of this kind says {name}: {json.dumps(value)}"
    else:
        both_sides, remedy = stated is not None or masked, ""
    if both_sides:
        why = f"{stated}: {json.dumps(config[stated])}" if stated else f"model_type {kind}"
        raise CheckpointError(
            f"it attends to both sides of a token ({why}), so it gives no probability of a text; "
            f"only causal language models are scored{remedy}"
        )


def require_sizes(config: dict[str, Any], *, tensors: int, elements: int) -> None:
    """Raise CheckpointError for a size that is no whole number above zero, or more than
    ``tensors`` weight tensors of ``elements`` numbers can fill: building such a model would hang
    or exhaust the memory before its tensors were compared."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for name in SIZES:
            value = part.get(name)
            if value is None or isinstance(value, list):  # a list: one size a layer
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(
                    f"config.json: {name} {value!r}: a whole number above 0 is needed"
                )
            limit = tensors if name in ("num_hidden_layers", "n_layer") else elements
            if value > limit and name not in LENGTHS:
                raise CheckpointError(
                    f"config.json: {name} {value}: the weight files hold {tensors} tensors of "
                    f"{elements} numbers in all; is this the configuration of these weights?"
                )
