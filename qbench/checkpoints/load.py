"""Weights into a stock transformers model with our attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.checkpoints import flash_linear_attention as fla
from qbench.checkpoints.checkpoint import Checkpoint
from qbench.checkpoints.find import stamps
from qbench.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: str, attention: str = "auto"
) -> PreTrainedModel:
    """The model in ``dtype`` on ``device``, in evaluation mode, attending with the checkpoint's
    normalizer through ``attention`` (auto, reference or triton).

    Raises CheckpointError where tensors are left over or missing or the files are no longer
    those that were found, UnavailableError where the attention cannot be had.
    """
    from qbench.attention.interface import attend

    if stamps(checkpoint.folder) != checkpoint.files:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its files changed after this run began; run again, "
            "so that every cell is scored under the key of what it loads"
        )
    if checkpoint.format == "flash-linear-attention":
        model = _load_flash_linear_attention(checkpoint, dtype)
    else:
        model = _load_transformers(checkpoint, dtype)
    model.config.qbench_normalizer = checkpoint.normalizer
    model = model.to(device).eval().requires_grad_(False)
    attend(model, normalizer=checkpoint.normalizer, implementation=attention)
    return model


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; runs no remote code."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (checkpoint.folder / "tokenizer.json").is_file() and checkpoint.format != "transformers":
            return PreTrainedTokenizerFast.from_pretrained(checkpoint.folder)
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: no usable tokenizer ({error})"
        ) from error


def _load_flash_linear_attention(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**fla.llama_settings(checkpoint.config))
    state = {
        fla.llama_name(name): tensor
        for path in sorted(checkpoint.folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)


def _load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named below, not loaded
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"checkpoint {checkpoint.source}: {reason}") from error
    problems = [
        f"{what}: {', '.join(sorted(map(str, report[key]))[:6])}"
        for key, what in (
            ("missing_keys", "missing"),
            ("unexpected_keys", "left over"),
            ("mismatched_keys", "misshapen"),
        )
        if report.get(key)
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: the tensors do not fit the configuration; "
            + "; ".join(problems)
        )
    return model
