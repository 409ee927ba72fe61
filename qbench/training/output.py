"""A trained model as a checkpoint folder in flash-linear-attention's format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.checkpoints import fla
from qbench.checkpoints.find import INDEX, SINGLE
from qbench.files import write_atomically
from qbench.training.token_files import copy_tokenizer
from qbench.training.tokenizer import begin_with


def save_checkpoint(
    model: LlamaForCausalLM,
    folder: Path,
    *,
    config: dict[str, Any],
    tokenizer: Path,
    first: int | None = None,
    largest_file: int | None = None,
) -> None:
    """Write ``config``, bfloat16 weights and the tokenizer of the folder ``tokenizer``.

    ``first``: id of the token that began every sequence of the training; the tokenizer that is
    written puts it before a text. ``largest_file``: bytes; weights beyond it go to several files.
    Each file is written whole or not at all, ``config.json`` last: without it a folder is no
    checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink(missing_ok=True)
    tensors = _stored(model, config)
    parts = _parts(tensors, largest_file)
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
        listed = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        index = {"metadata": {"total_size": _bytes(tensors)}, "weight_map": listed}
        write_atomically(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    for name, part in zip(names, parts, strict=True):
        write_atomically(folder / name, save(part, {"format": "pt"}))
    copy_tokenizer(tokenizer, folder)
    if first is not None:
        begin_with(first, folder)
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _stored(model: LlamaForCausalLM, config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in bfloat16 by flash-linear-attention's names, sorted."""
    scaled = "scaled" in config.get("attn_impl", "")  # its scale is [H, 1], beside a fixed table
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        tensors[fla.own_name(name)] = (
            tensor[:, None] if scaled and name.endswith(".self_attn.s") else tensor
        )
    if scaled:
        longest = config["max_position_embeddings"]
        tensors |= fla.logarithms(config["num_hidden_layers"], longest)
    return dict(sorted(tensors.items()))


def _parts(tensors: dict[str, Tensor], largest: int | None) -> list[dict[str, Tensor]]:
    """In order, no more than ``largest`` bytes each, but for a tensor that is larger itself."""
    parts: list[dict[str, Tensor]] = [{}]
    room = math.inf if largest is None else largest
    for name, tensor in tensors.items():
        if parts[-1] and _bytes(parts[-1]) + tensor.nbytes > room:
            parts.append({})
        parts[-1][name] = tensor
    return parts


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
