"""What is known of a checkpoint before its weights are loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.checkpoints import flash_linear_attention as fla
from qbench.checkpoints.abilities import Abilities, abilities
from qbench.records import TRAINING_FILE, Trained, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose configuration and tensor headers were read and agree.

    ``digest`` is the SHA-256 over every file that loading it reads: weights, configuration,
    generation settings, tokenizer and chat template.
    """

    source: str  # as the user named it
    folder: Path
    format: str  # "flash-linear-attention" or "transformers"
    normalizer: str
    config: dict[str, Any]
    digest: str
    files: tuple[tuple[str, int, int], ...]  # name, bytes, time of change of what was digested

    @property
    def abilities(self) -> Abilities:
        """Whose attention it can run on, and how fast it can be scored."""
        known = fla.llama_settings(self.config) if fla.recognizes(self.config) else self.config
        return abilities(known)

    @property
    def training(self) -> Trained | None:
        """How it was trained, where qbench trained it; other programs' files are no matter."""
        try:
            payload = (self.folder / TRAINING_FILE).read_bytes()
            return Training.model_validate_json(payload).summary
        except (OSError, ValueError):
            return None

    @property
    def max_length(self) -> int | None:
        """Longest context in tokens that the configuration states."""
        return self.config.get("max_position_embeddings") or self.config.get("n_positions")
