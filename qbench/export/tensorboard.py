"""Scores and what the audit measured as TensorBoard's scalars, a run for each cell."""

from __future__ import annotations

from pathlib import Path

from qbench.errors import UnavailableError
from qbench.export.scalars import scalars
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
