"""The folder of one training: the state that it resumes from, its checkpoints, its
record, and its log as JSON Lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.checkpoints.find import CONFIG, SINGLE
from qbench.errors import DamagedError, TrainingError, first_line, validation_line
from qbench.files import content_key, file_digest, replacing, save_tensors, write_atomically
from qbench.records import TRAINING_FILE, Training, TrainingSession, read_training
from qbench.training.data import (
    TokenFiles,
    begin_with,
    copy_tokenizer,
    first_token,
    tokenizer_files,
)
from qbench.training.model import model_settings
from qbench.training.training_recipe import TrainingRecipe, split_gate

STATE, LOG = "state", "log.jsonl"


class Progress(BaseModel):
    """Holds the progress of a training: the part of a state that is not tensors."""

    settings: str  # digest of all that shapes the run
    step: int = 0  # steps done
    lowest_loss: float | None = None  # of the means that were logged
    held_out: str | None = None  # digest of the held-out texts; None: an older qbench's state
    best_loss: float | None = None  # on the held-out texts
    best_step: int | None = None
    kernels: list[str] = []
    sessions: list[TrainingSession] = []
    log: list[dict[str, Any]] = []  # its lines, of the main process


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training of a recipe, and the folder that it writes."""

    recipe: TrainingRecipe
    files: TokenFiles
    normalizer: str
    seed: int
    folder: Path

    @property
    def settings_digest(self) -> str:
        """Return the digest of the recipe's settings, the data, the normalizer and the seed. A
        state is resumed only if its digest is equal; versions of libraries do not count."""
        parts = {
            "settings": self.recipe.settings(),
            "data": self.files.about.digest,
            "normalizer": self.normalizer,
            "seed": self.seed,
        }
        return content_key(parts)

    @property
    def state(self) -> Path:
        """Return the path of the state from which the run resumes."""
        return self.folder / STATE / "last.safetensors"

    @property
    def log(self) -> Path:
        """Return the log's path: JSON Lines of ``kind`` (step or watch), ``step``, numbers."""
        return self.folder / STATE / LOG

    def save_state(
        self,
        progress: Progress,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Replace the saved state by ``progress``, the parameters and the optimizer's tensors, with
        a checksum of all. A process that is killed meanwhile leaves the previous file."""
        tensors = {}
        for name, parameter in parameters.items():
            tensors[f"model/{name}"] = parameter.detach().cpu().contiguous()
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer0/{name}/{key}"] = value.cpu().contiguous()
        tensors = dict(sorted(tensors.items()))
        text = progress.model_dump_json()
        about = {"progress": text, "sha256": _checksum(text, tensors.items())}
        with replacing(self.state) as making:
            save_tensors(making, tensors, about)

    def load_state(
        self, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> Progress:
        """Restore parameters and optimizer from ``save_state``'s file, bit for bit, and return its
        progress; without a file change nothing and return the progress of a new training. Raises
        TrainingError if the state has other settings or is damaged."""
        if not self.state.exists():
            return Progress(settings=self.settings_digest)
        try:
            with safe_open(self.state, framework="pt") as file:
                names = sorted(file.keys())
                metadata = file.metadata() or {}
                progress = Progress.model_validate_json(metadata["progress"])
                tensors = ((name, file.get_tensor(name)) for name in names)
                if metadata.get("sha256") != _checksum(metadata["progress"], tensors):
                    raise ValueError("its checksum does not match")
                self._require_same(progress.settings)
                for name in names:
                    kind, _, rest = name.partition("/")
                    value = file.get_tensor(name)
                    if kind == "model":
                        parameters[rest].data.copy_(value)
                    else:
                        of, _, key = rest.rpartition("/")
                        parameter = parameters[of]
                        optimizer.state[parameter][key] = value.to(parameter.device)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise TrainingError(
                f"{self.state}: damaged (not the state that was written: {first_line(error)}); "
                "remove it to train from the start"
            ) from None
        return progress

    def save(self, model: LlamaForCausalLM, folder: Path) -> None:
        """Write ``model`` as a checkpoint of transformers, with bfloat16 weights, and the token
        files' tokenizer. Each file is replaced in one step, ``config.json`` last: a folder without
        it is no checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        tensors = {
            name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
            for name, parameter in sorted(model.named_parameters())
        }
        with replacing(folder / SINGLE) as making:
            save_tensors(making, tensors, {"format": "pt"})
        copy_tokenizer(self.files.folder, folder)
        first = first_token(self.recipe, self.files)
        if first is not None:
            begin_with(first, folder)
        config = {
            "architectures": [type(model).__name__],
            **model_settings(self.recipe.model, self.normalizer, **self.files.about.special),
            "qbench_normalizer": split_gate(self.normalizer)[0],
            "torch_dtype": "bfloat16",
        }
        write_atomically(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())

    def file_digests(self) -> dict[str, str]:
        """Return path → SHA-256 of the final checkpoint's files and the log. Left out are the best
        checkpoint, the record, and the state."""
        weights, tokenizer = self.folder / SINGLE, tokenizer_files(self.folder)
        paths = [self.folder / CONFIG, weights, *tokenizer, self.log]
        return {path.relative_to(self.folder).as_posix(): file_digest(path) for path in paths}

    def finished(self) -> Training | None:
        """Return the record of the training; None if it is not finished. Raises TrainingError if
        its settings differ, or if the record or a file was changed."""
        path = self.folder / TRAINING_FILE
        if not path.is_file():
            return None
        remedy = f"remove {path}; the same command then writes the checkpoint from the last state"
        try:
            record = read_training(path)
        except (ValueError, DamagedError) as error:
            kind = validation_line if isinstance(error, ValidationError) else first_line
            line = kind(error).removeprefix(f"{path}: ")
            raise TrainingError(f"{path}: damaged: {line}; {remedy}") from None
        self._require_same(record.settings_digest)
        for name, written in record.files.items():
            file = self.folder / name
            if not file.is_file() or file_digest(file) != written:
                raise TrainingError(f"{file}: missing, or changed after training; {remedy}")
        return record

    def _require_same(self, settings_digest: str) -> None:
        """Raise TrainingError if ``settings_digest``, of a state or record, is not this run's."""
        if settings_digest != self.settings_digest:
            raise TrainingError(
                f"{self.folder}: holds a training of other settings, data or seed; name another "
                "--out, or remove this folder"
            )


def _checksum(progress: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over the progress and names, dtypes, shapes, bytes of CPU tensors."""
    total = hashlib.sha256(progress.encode())
    for name, tensor in tensors:
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()
