"""Scores and what the audit measured as TensorBoard's scalars, a run for each cell."""

from __future__ import annotations

from pathlib import Path

from qbench.errors import UnavailableError
from qbench.record import Damage, Record
from qbench.store import Store


def write(store: Store, folder: Path) -> list[Path]:
    """Event files in ``<checkpoint>/<quantizer>`` below ``folder``, for every good cell.

    Raises UnavailableError where tensorboard is not installed.
    """
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise UnavailableError(
            "--to tensorboard: tensorboard is not installed; pip install tensorboard"
        ) from None
    paths = []
    for record in store.records():
        if record.status != "ok":
            continue
        place = folder / record.checkpoint / record.quantizer
        writer = Writer(str(place))
        for name, value in scalars(record).items():
            writer.add_scalar(name, value, step=0)
        writer.close()
        paths.append(place)
    return paths


def scalars(record: Record) -> dict[str, float]:
    """Values by name, ``task/metric`` and ``audit/…``; accuracies are fractions."""
    found = {f"{score.task}/{score.metric}": score.value for score in record.scores}
    if record.audit is not None and record.quantized:
        found["audit/bits_per_weight"] = record.audit.bits_per_weight
        found["audit/weight_error"] = record.audit.weight_error
    if isinstance(record.damage, Damage):
        for task, one in record.damage.tasks.items():
            if one.distributions is not None:
                found[f"{task}/mean_kl"] = one.distributions.kl.mean
    return found
