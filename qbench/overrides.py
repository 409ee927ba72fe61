"""What the command line, or a caller, puts in place of parts of a recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """None, or no entry: what the recipe says. Paths are relative to the working folder."""

    checkpoints: Mapping[str, str] = field(default_factory=dict)  # name → folder or hub id
    quantizers: tuple[str, ...] | None = None  # names, or labels of the recipe's
    tasks: tuple[str, ...] | None = None  # lm-eval's names
    definitions: Path | None = None  # folder of further tasks' definitions
    data: Path | None = None  # folder of <task>/<split>.jsonl
    calibration: Path | None = None  # JSON Lines with a text field, or hf://datasets/…
    skip_missing: bool = False  # leave tasks out that the data folder lacks
    limit: int | None = None  # documents of each task
    dtype: str | None = None  # bfloat16 or float32: of all cells, unquantized ones too
    scoring: str | None = None  # auto, exact, fast or lm-eval
