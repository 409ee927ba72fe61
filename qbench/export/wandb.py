"""Weights & Biases runs, one for each cell, in its offline format: nothing is sent from here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qbench.errors import UnavailableError
from qbench.export.scalars import scalars
from qbench.records import Record
from qbench.store import KEY_DIGITS, Store

PROJECT = "qbench"


def write(store: Store, folder: Path) -> list[Path]:
    """Run folders ``wandb/offline-run-<date>-<id>`` below ``folder``, for every good cell;
    ``wandb sync`` sends them. A run's id is its record's key, so that a cell is there once.

    Raises UnavailableError where wandb is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise UnavailableError("--to wandb: wandb is not installed; pip install wandb") from None
    name = store.grid().name
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for record in store.records():
        if record.status != "ok":
            continue
        run = wandb.init(
            mode="offline",
            project=PROJECT,
            group=name,
            name=record.cell,
            id=record.key[:KEY_DIGITS],
            dir=folder,
            config=about(record),
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        run.log(scalars(record))
        paths.append(Path(run.dir).parent)
        run.finish()
    return paths


def about(record: Record) -> dict[str, Any]:
    """What a run was of: its name's parts, and all that its key is the hash of."""
    return {
        "checkpoint": record.checkpoint,
        "quantizer": record.quantizer,
        "method": record.title,
        "precision": record.precision.name,
        "normalizer": record.normalizer,
        "key": record.key,
        "made": record.finished.isoformat(),
        "key_parts": record.key_parts,
    }
