"""A checkpoint written in the other format: as a stock class of transformers, or as
flash-linear-attention's ``transformer``. Tensors keep their dtype and their bits.

What the other format cannot say is refused by name; nothing is approximated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from qbench.checkpoints import fla
from qbench.checkpoints.find import (
    INDEX,
    SINGLE,
    Checkpoint,
    file_names,
    find,
    is_parameter,
    named,
    read_headers,
    weight_files,
)
from qbench.checkpoints.load import read_model, read_tensor
from qbench.checkpoints.supported import class_names
from qbench.checkpoints.tokenizer import other_tokens
from qbench.errors import CheckpointError, OutputError
from qbench.files import clean_temporaries, new_folder, require_folder, save_tensors

Format = Literal["llama", "fla"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
Tensors = dict[str, torch.Tensor]


def convert(checkpoint: Checkpoint, to: Format, out: Path) -> list[Path]:
    """Write ``checkpoint`` into the new folder ``out``, tokenizer and generation settings along;
    the files. Nothing is there before all of it is.

    Raises CheckpointError for what the other format cannot say, OutputError where ``out`` is
    there already or cannot be written.
    """
    require_folder(out)
    if out.exists() and any(out.iterdir()):
        raise OutputError(f"{out}: is not empty; name a new folder")
    ours = fla.recognizes(checkpoint.config)
    with named(checkpoint.source):
        if ours == (to == "fla"):
            raise CheckpointError("it is in this format already")
        config, tensors = _to_llama(checkpoint) if to == "llama" else _to_fla(checkpoint)
    clean_temporaries(out.parent)
    with new_folder(out) as folder:
        _write(folder, config, tensors, checkpoint)
        # what was written can be read as what it claims to be, and cuts texts as before
        written = find(str(folder))
        with named(checkpoint.source):
            read_model(written, getattr(torch, config["dtype"]))
        _require_same_tokens(checkpoint, written)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _write(folder: Path, config: dict[str, Any], tensors: Tensors, checkpoint: Checkpoint) -> None:
    weights = {*weight_files(checkpoint.folder), INDEX, "config.json"}
    for name in file_names(checkpoint.folder):
        if name not in weights:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(checkpoint.folder / name, folder / name)
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_tensors(folder / SINGLE, whole, {"format": "pt"})


def _require_same_tokens(before: Checkpoint, after: Checkpoint) -> None:
    """Raise CheckpointError where the tokenizer of one format cuts a text otherwise than the
    other's: transformers builds one from the class that it knows of a model's type, the other from
    the files alone."""
    if not any((before.folder / name).exists() for name in TOKENIZER_FILES):
        return
    other = other_tokens(before, after, special=(True, False))
    if other is not None:
        text, old, new = other
        raise CheckpointError(
            f"checkpoint {before.source}: its tokenizer makes {old} of {text}, and the one that "
            f"the other format reads from the same files {new}; its scores would change, so "
            "nothing is written"
        )


def _tensors(checkpoint: Checkpoint) -> Tensors:
    headers = read_headers(checkpoint.folder).items()
    return {name: read_tensor(checkpoint.folder, header) for name, header in headers}


def _to_llama(checkpoint: Checkpoint) -> tuple[dict[str, Any], Tensors]:
    settings = fla.llama_settings(checkpoint.config)
    kind = settings["model_type"]
    if kind == "qwen3" and settings["rms_norm_eps"] != fla.QK_NORM_EPS:
        raise CheckpointError(
            f"norm_eps {settings['rms_norm_eps']:g} with qk_norm: flash-linear-attention's query "
            f"and key norms have {fla.QK_NORM_EPS:g}, but Qwen3ForCausalLM has one for all norms"
        )
    tensors = fla.llama_tensors(_tensors(checkpoint))
    tensors |= fla.output_biases(settings, tensors)
    if settings["tie_word_embeddings"]:
        tensors.pop(fla.HEAD, None)
    config = AutoConfig.for_model(**settings).to_dict()
    stated = {"architectures": [class_names()[kind]], "qbench_normalizer": checkpoint.normalizer}
    return {**config, **stated, "dtype": _dtype(checkpoint)}, tensors


def _to_fla(checkpoint: Checkpoint) -> tuple[dict[str, Any], Tensors]:
    kind = checkpoint.config["model_type"]
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise CheckpointError(f"flash-linear-attention has no {checkpoint.support.name}")
    config = AutoConfig.from_pretrained(checkpoint.folder)
    tensors = _tensors(checkpoint)
    if checkpoint.normalizer not in fla.IMPLEMENTATION_OF:
        raise CheckpointError(f"flash-linear-attention has no normalizer {checkpoint.normalizer}")
    window = _window(config)
    _require_same(config, tensors, window is not None and checkpoint.normalizer != "softmax")
    implementation = fla.IMPLEMENTATION_OF[checkpoint.normalizer]
    scaled = "scaled" in implementation
    for name in tensors:
        if is_parameter(checkpoint.normalizer, name) and not (scaled and name.endswith(".s")):
            raise CheckpointError(f"{name}: flash-linear-attention's transformer does not have it")
    names = {name: fla.own_name(name) for name in tensors}
    written = {
        names[name]: tensor[:, None] if scaled and name.endswith(".self_attn.s") else tensor
        for name, tensor in tensors.items()
        if not name.endswith("self_attn.o_proj.bias")
        and not (config.tie_word_embeddings and name == fla.HEAD)
    }
    if scaled:
        written |= fla.logarithms(config.num_hidden_layers, config.max_position_embeddings)
    biased = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
    return {
        "architectures": ["TransformerForCausalLM"],
        "attn_impl": "flash_attn" if window is not None else implementation,
        "bos_token_id": config.bos_token_id,
        "dtype": _dtype(checkpoint),
        "elementwise_affine": True,
        "eos_token_id": config.eos_token_id,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "hidden_act": "swish",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "transformer",
        "norm_eps": config.rms_norm_eps,
        "num_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_kv_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "qk_norm": kind == "qwen3",
        "qkv_bias": biased,
        "rope_theta": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "window_size": window,
    }, written


def _require_same(config: Any, tensors: Tensors, odd_window: bool) -> None:
    """Raise CheckpointError for what flash-linear-attention's attention does not compute."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    biases = [t for n, t in tensors.items() if n.endswith("o_proj.bias")]
    problems = {
        "hidden_act": config.hidden_act not in ("silu", "swish"),
        "head_dim": head * config.num_attention_heads != config.hidden_size,
        "rope_parameters": rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "attention_bias": any(bool(bias.any()) for bias in biases),
        "rms_norm_eps": config.model_type == "qwen3" and config.rms_norm_eps != fla.QK_NORM_EPS,
        "sliding_window": odd_window,
        "eos_token_id": isinstance(config.eos_token_id, list),
    }
    for name, wrong in problems.items():
        if wrong:
            raise CheckpointError(
                f"{name} {getattr(config, name, None)!r:.60}: flash-linear-attention's transformer "
                "does not have that"
            )


def _window(config: Any) -> int | None:
    """The window of every layer; None for none. Raises CheckpointError where layers differ."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise CheckpointError("layer_types: flash-linear-attention has one window for all layers")
    return window


def _dtype(checkpoint: Checkpoint) -> str:
    """Of the largest tensor, in the words of a config.json."""
    words = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    headers = read_headers(checkpoint.folder).values()
    return words[max(headers, key=lambda header: header.shape).dtype]
