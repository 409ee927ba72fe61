"""What a training writes: a state that it goes on from, and checkpoint folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.checkpoints import fla
from qbench.checkpoints.find import SINGLE
from qbench.errors import TrainingError, first_line
from qbench.files import digest, write_atomically
from qbench.records import TrainingSession
from qbench.training.data import copy_tokenizer
from qbench.training.tokenize import begin_with


class Progress(BaseModel):
    """How far a run is, beside its tensors."""

    settings: str  # digest of all that shapes the run
    step: int = 0  # steps done
    lowest_loss: float | None = None  # of the means that were logged
    best_loss: float | None = None  # on the held-out texts
    best_step: int | None = None
    kernels: list[str] = []
    sessions: list[TrainingSession] = []
    log: list[dict[str, Any]] = []  # its lines, of the main process


def require_same(known: str, settings: str, folder: Path) -> None:
    """Raises TrainingError where ``folder`` holds a run under another digest of its settings."""
    if known != settings:
        raise TrainingError(
            f"{folder}: holds a training of other settings, data or seed; name another --out, or "
            "remove it"
        )


def save_state(
    path: Path,
    progress: Progress,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Replace ``path``, with a checksum of all that is in it; a process that is killed meanwhile
    leaves the old file whole."""
    found = {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer0/{name}/{key}"] = value
    tensors = {name: tensor.cpu().contiguous() for name, tensor in found.items()}
    text = progress.model_dump_json()
    about = {"progress": text, "sha256": _checksum(text, tensors)}
    write_atomically(path, save(tensors, about))


def load_state(
    path: Path,
    settings: str,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Put back what ``save_state`` kept, bit for bit. Raises TrainingError for a run under another
    digest of its ``settings``, and where a bit of it is not what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            stated = file.metadata() or {}
            progress = Progress.model_validate_json(stated["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _damaged(path, f"not a training's state: {first_line(error)}") from None
    if stated.get("sha256") != _checksum(stated["progress"], tensors):
        raise _damaged(path, "its content is not what was written")
    require_same(progress.settings, settings, path.parent)
    for full, value in tensors.items():
        kind, _, rest = full.partition("/")
        if kind == "model":
            parameters[rest].data.copy_(value)
        else:
            name, _, key = rest.rpartition("/")
            parameter = parameters[name]
            optimizer.state[parameter][key] = value.to(parameter.device)
    return progress


def _damaged(path: Path, why: str) -> TrainingError:
    return TrainingError(f"{path}: damaged ({why}); remove it to train from the start")


def _checksum(progress: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the progress, and names, dtypes, shapes and bytes of tensors on the CPU."""
    total = hashlib.sha256(progress.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def save_checkpoint(
    model: LlamaForCausalLM,
    folder: Path,
    *,
    config: dict[str, Any],
    tokenizer: Path,
    first: int | None = None,
) -> dict[str, str]:
    """Write ``config``, bfloat16 weights and the tokenizer of the folder ``tokenizer``; returns the
    SHA-256 of the file of weights by its name.

    ``first``: id of the token that began every sequence of the training; the tokenizer that is
    written puts it before a text. Each file is written whole or not at all, ``config.json`` last:
    without it a folder is no checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    payload = save(_stored(model, config), {"format": "pt"})
    write_atomically(folder / SINGLE, payload)
    copy_tokenizer(tokenizer, folder)
    if first is not None:
        begin_with(first, folder)
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    return {SINGLE: digest(payload)}


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
