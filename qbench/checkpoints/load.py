"""Weights into a stock transformers model with our attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from qbench.attention.implementation import NATIVE
from qbench.attention.transformers import attend
from qbench.checkpoints import fla
from qbench.checkpoints.checks import (
    own_logits,
    read_tensor,
    require_causal,
    require_finite,
    require_ours,
    require_own_head,
    require_tied,
)
from qbench.checkpoints.find import (
    Checkpoint,
    is_parameter,
    parameter_shapes,
    read_headers,
    require_fit,
    stamps,
    weight_files,
)
from qbench.checkpoints.supported import choose_attention, class_names
from qbench.errors import CheckpointError, UnavailableError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    attention: str = "auto",
    place: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
    verify: bool = True,
) -> PreTrainedModel:
    """The model in ``dtype`` on ``device``, in evaluation mode. It attends with the checkpoint's
    normalizer through ``attention``: reference or triton. Where the normalizer is ``native`` it is
    sdpa or eager, which are the class's own; auto is what a plan would choose. ``place`` puts the
    model, which lies on the host, elsewhere (see :mod:`qbench.streaming`). Without ``verify`` the
    weights, which have been loaded before, are not looked at.

    Raises CheckpointError where tensors are left over or missing, where weights are not finite,
    where the model is not causal or the files are no longer those that were found;
    UnavailableError where the attention cannot be had.
    """
    if attention == "auto":
        chosen = choose_attention(
            checkpoint.source, checkpoint.support, checkpoint.normalizer, attention, device
        )
        checkpoint = replace(checkpoint, normalizer=chosen.normalizer)
        attention = chosen.implementation
    native = checkpoint.normalizer == NATIVE
    fla_format = checkpoint.format == "flash-linear-attention"

    try:
        if stamps(checkpoint.folder) != checkpoint.files:
            raise CheckpointError("its files changed after this run began; run again")
        if fla_format:
            model = _load_flash_linear_attention(checkpoint, dtype)
        else:
            model = _load_transformers(checkpoint, dtype)
        model = model.eval().requires_grad_(False)
        model = place(model) if place else model.to(device)
        if verify:
            require_finite(model)
        if native:
            set_attention(model, NATIVE, attention)
        logits = own_logits(model) if verify and not fla_format else None
        if logits is not None:
            require_causal(model, logits)
        if not native:
            set_attention(model, checkpoint.normalizer, attention)
            if logits is not None and "qbench_normalizer" not in checkpoint.config:
                require_ours(model, logits)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {checkpoint.source}: {error}") from error
    return model


def set_attention(model: PreTrainedModel, normalizer: str, implementation: str) -> None:
    """Let ``model`` attend with ``normalizer``, or as its own class does. Raises UnavailableError
    where that has not the ``implementation``: transformers may only log it."""
    model.config.qbench_normalizer = normalizer
    if normalizer != NATIVE:
        attend(model, normalizer=normalizer, implementation=implementation)
        return
    reason = "transformers keeps another"
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        reason = first_line(error)
    if model.config._attn_implementation != implementation:
        raise UnavailableError(
            f"{type(model).__name__} has no {implementation} of its own ({reason})"
        )


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; runs no remote code."""
    try:
        if (checkpoint.folder / "tokenizer.json").is_file() and checkpoint.format != "transformers":
            return PreTrainedTokenizerFast.from_pretrained(checkpoint.folder)
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes of the libraries
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: no usable tokenizer ({first_line(error)})"
        ) from error


def read_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors of the weight files by name. Raises CheckpointError for a broken file."""
    try:
        return {
            name: tensor
            for file in weight_files(checkpoint.folder)
            for name, tensor in load_file(checkpoint.folder / file).items()
        }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(first_line(error)) from error


def _load_flash_linear_attention(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    settings = fla.llama_settings(checkpoint.config)
    state = fla.llama_tensors(read_tensors(checkpoint))
    if settings["tie_word_embeddings"] and fla.HEAD in state:
        require_tied(fla.HEAD, state.pop(fla.HEAD), state[fla.EMBEDDINGS])
    known = fla.expected_shapes(settings)
    own = {name: state.pop(name) for name in list(state) if name not in known}
    model = _of_class(settings, state, dtype)
    attach(model, checkpoint.normalizer, own)
    if (checkpoint.folder / "generation_config.json").is_file():  # as transformers would read it
        try:
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
        except Exception as error:  # whatever odd values make of transformers
            raise CheckpointError(f"generation_config.json: {first_line(error)}") from error
    return model


def _of_class(
    settings: dict[str, Any], state: dict[str, torch.Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The stock class that ``settings`` name, with the weights of ``state``."""
    config = transformers.AutoConfig.for_model(**settings)
    model_class = getattr(transformers, class_names()[settings["model_type"]])
    state = state | fla.output_biases(settings, state)
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    for name, module in model.named_modules():
        if name.endswith((".q_norm", ".k_norm")):
            module.variance_epsilon = fla.QK_NORM_EPS
    return model


def _load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named below, not loaded
        )
    except Exception as error:  # whatever an odd configuration makes of transformers
        raise CheckpointError(first_line(error)) from error
    headers = read_headers(checkpoint.folder)
    extra = set(report.get("unexpected_keys") or ()) & set(headers)
    own = sorted(name for name in extra if is_parameter(checkpoint.normalizer, name))
    missing, left_over, misshapen = (
        sorted(str(name) for name in report.get(key) or () if name not in own)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    require_fit(missing, left_over, misshapen)
    attach(
        model,
        checkpoint.normalizer,
        {name: read_tensor(checkpoint.folder / headers[name].file, name) for name in own},
    )
    require_own_head(model, checkpoint.folder, headers)
    return model


def attach(model: PreTrainedModel, normalizer: str, tensors: dict[str, torch.Tensor]) -> None:
    """Put ``tensors`` by name into the attention modules of ``model``, in its dtype.

    Raises CheckpointError for a missing module, for a shape that is not the parameter's, and for a
    module that lacks what others of its class have.
    """
    if not tensors:  # models without attention heads are refused by name elsewhere
        return
    heads = model.config.num_attention_heads
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        expected = parameter_shapes(normalizer, [path], heads, [name])[name]
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise CheckpointError(f"left over: {name}; the model has no {path}") from None
        if list(tensor.shape) != expected:
            raise CheckpointError(f"misshapen: {name} {list(tensor.shape)} instead of {expected}")
        value = nn.Parameter(tensor.to(model.dtype), requires_grad=False)
        module.register_parameter(attribute, value)
    for attribute in {name.rpartition(".")[2] for name in tensors}:
        of = {type(m) for m in model.modules() if attribute in m._parameters}
        without = [
            f"{path}.{attribute}"
            for path, m in model.named_modules()
            if type(m) in of and attribute not in m._parameters
        ]
        if without:
            raise CheckpointError(f"missing: {', '.join(without[:6])}")
