"""How far a training is, read from its state alone. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qbench.errors import TrainingError

LAST = "last.safetensors"


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is, beside its tensors."""

    settings: str  # digest of all that shapes the run
    step: int = 0  # steps done
    lowest_loss: float | None = None  # of the means that were logged
    best_loss: float | None = None  # on the held-out texts
    best_step: int | None = None
    kernels: list[str] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)


def require_same(known: str, settings: str, folder: Path) -> None:
    """Raises TrainingError where ``folder`` holds a run under another digest of its settings."""
    if known != settings:
        raise TrainingError(
            f"{folder}: holds a training of other settings, data or seed; name another --out, or "
            "remove it"
        )


def read_progress(path: Path) -> Progress:
    """Raises TrainingError where the file is none of ours."""
    try:
        with safe_open(path, framework="numpy") as file:
            return Progress(**json.loads((file.metadata() or {})["progress"]))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise TrainingError(
            f"{path}: not a training's state ({error}); remove it to train from the start"
        ) from None
