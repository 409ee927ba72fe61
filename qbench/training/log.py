"""What is written while a training runs: JSON Lines, and TensorBoard or W&B where asked for."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

from qbench.errors import UnavailableError

FILE = "log.jsonl"
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}  # option → distribution


class Tracker(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Log:
    """One JSON object a line: ``kind`` (step or watch), ``step``, and its numbers."""

    def __init__(self, path: Path, *, step: int, trackers: list[Tracker]) -> None:
        """Lines after ``step`` are dropped: a resumed training makes them again. A negative one:
        training starts, and so does the log."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= step] if path.exists() else []
        making = path.with_name(f".{path.name}.new")
        making.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(making, path)
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, kind: str, step: int, **values: float | int | None) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        shown = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(step, {f"{kind}/{name}": value for name, value in shown.items()})

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a killed process left half is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict) and "step" in line]


def require_trackers(names: list[str]) -> None:
    """Raises UnavailableError for one whose library is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UnavailableError(f"--tracker {name}: unknown; possible: {', '.join(TRACKERS)}")
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise UnavailableError(f"--tracker {name}: {TRACKERS[name]} is not installed")


def trackers(names: list[str], folder: Path, run: str, settings: dict[str, Any]) -> list[Tracker]:
    made = {"tensorboard": lambda: _TensorBoard(folder), "wandb": lambda: _Wandb(run, settings)}
    return [made[name]() for name in names]


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: str, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project="qbench", name=run, config=settings, resume="allow")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
