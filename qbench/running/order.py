"""In which order cells begin that run side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence

from qbench.plan import Cell


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """For cells side by side: what others wait for first, then what takes longest, which is exact
    scoring where others are scored fast, then calibration. Last are cells whose calibrated weights
    or scales another makes: beside it they would wait, and keep a worker from others.

    Until the unquantized cells are scored, all others can but load and quantize, and then wait. So
    what begins beside them is cells that calibrate, as many as they are."""
    reused = _calibrated_by_another(cells)
    found = sorted(
        cells,
        key=lambda cell: (
            cell.base is not None,
            cell.scoring.mode == "fast",
            cell.name in reused,
            not cell.quantization.needs_calibration,
        ),
    )
    first = [cell for cell in found if cell.base is None]
    calibrated = [
        cell
        for cell in found[len(first) :]
        if cell.quantization.needs_calibration and cell.name not in reused
    ]
    first += calibrated[: len(first)]
    begun = {cell.name for cell in first}
    return first + [cell for cell in found if cell.name not in begun]


def _calibrated_by_another(cells: Sequence[Cell]) -> set[str]:
    """Cells all of whose calibrated stages an earlier one of ``cells`` makes."""
    made: set[tuple[str, str]] = set()
    found = set()
    for cell in cells:
        stages = [
            (cell.checkpoint.digest, json.dumps(stage.to_dict(), sort_keys=True, default=str))
            for stage in cell.quantization.stages
            if stage.needs_calibration
        ]
        if stages and made.issuperset(stages):
            found.add(cell.name)
        made.update(stages)
    return found
