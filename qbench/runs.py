"""The runs into one results folder: what each of them was of, in ``grids/<id>.json``. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from qbench.errors import ResultsError
from qbench.files import digest
from qbench.record import Grid

GRIDS = "grids"


def run_id(grid: Grid) -> str:
    """Of what a run was of: 8 hexadecimal digits, the same for the same cells and tasks."""
    content = [grid.tasks, grid.checkpoints, [cell.key for cell in grid.cells]]
    return digest(json.dumps(content).encode())[:8]


def runs(directory: Path) -> list[tuple[str, Path]]:
    """Id and file of what each run into a folder was of, the newest first."""
    files = (Path(directory) / GRIDS).glob("*.json")
    return [(path.stem, path) for path in sorted(files, key=_age)]


def find_run(directory: Path, wanted: str) -> Path:
    """Raises ResultsError where no run, or more than one, begins with ``wanted``."""
    known = runs(directory)
    found = [path for name, path in known if wanted and name.startswith(wanted)]
    if len(found) != 1:
        names = ", ".join(name for name, _ in known) or "none"
        raise ResultsError(f"--run {wanted}: {directory} has no such run; it has {names}")
    return found[0]


def _age(path: Path) -> float:
    return -path.stat().st_mtime
