"""A training that can go on: weights, optimizer and step in one file, written whole or not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from qbench.errors import OutputError, TrainingError
from qbench.files import reason, temporary
from qbench.training.progress import Progress, read_progress


def save_state(
    path: Path,
    progress: Progress,
    parameters: dict[str, nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Replace ``path``; a process that is killed meanwhile leaves the old file whole."""
    tensors = {f"model/{name}": p.detach() for name, p in parameters.items()}
    tensors |= _optimizer_tensors(parameters, optimizers)
    making = temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"progress": json.dumps(asdict(progress))}
        save_file({name: t.contiguous() for name, t in tensors.items()}, making, metadata)
        _flush(making)
        making.replace(path)
        _flush(path.parent)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({reason(error)})") from None
    finally:
        making.unlink(missing_ok=True)


def load_state(
    path: Path,
    parameters: dict[str, nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
) -> Progress:
    """Put back what ``save_state`` kept, bit for bit. Raises TrainingError for another model's."""
    progress = read_progress(path)
    with safe_open(path, framework="pt") as file:
        there = set(file.keys())
        expected = {f"model/{name}" for name in parameters}
        if expected != {name for name in there if name.startswith("model/")}:
            raise TrainingError(f"{path}: holds another model's weights; remove it")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(file.get_tensor(f"model/{name}"))
        for index, optimizer in enumerate(optimizers):
            _put_back(file, there, index, optimizer, parameters)
    return progress


def _optimizer_tensors(
    parameters: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        f"optimizer{index}/{names[id(parameter)]}/{key}": value
        for index, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _put_back(
    file: Any,
    there: set[str],
    index: int,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
) -> None:
    kept: dict[str, dict[str, Tensor]] = {}
    for name in there:
        if name.startswith(f"optimizer{index}/"):
            parameter, _, key = name.partition("/")[2].rpartition("/")
            kept.setdefault(parameter, {})[key] = file.get_tensor(name)
    for name, state in kept.items():
        parameter = parameters[name]
        fused = optimizer.defaults.get("fused")
        optimizer.state[parameter] = {
            # AdamW counts its steps on the CPU unless it is fused
            key: value.to(parameter.device) if key != "step" or fused else value
            for key, value in state.items()
        }


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
