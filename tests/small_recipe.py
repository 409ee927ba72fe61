"""A recipe of the bundled pair that runs in seconds."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qbench.cli.app import app
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.store import Store

DEMO = Path(__file__).parent.parent / "recipes" / "demo"
SOFTPICK = {"softpick": str(DEMO / "softpick")}  # one checkpoint instead of the pair


@cache
def blocks(*names: str) -> dict[str, str]:
    """Checkpoints of the first two blocks of the bundled models, whose cells take less time."""
    from published_copies import first_blocks

    folder = Path(tempfile.mkdtemp(prefix="qbench-blocks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {name: str(first_blocks(DEMO / name, folder / name)) for name in names}


def small_recipe(folder: Path, **changes: Any) -> Path:
    """Two checkpoints, unquantized and rounded to nearest in 4 bits, three documents a task."""
    content = {
        "name": "small",
        "checkpoints": {"softmax": str(DEMO / "softmax"), "softpick": str(DEMO / "softpick")},
        "compute_dtype": "float32",
        "quantizers": ["fp32", {"name": "rtn-4bit", "group_size": 64}],
        "tasks": ["demo_choice", "demo_lastword", "demo_pages"],
        "definitions": str(DEMO / "tasks"),
        "data": str(DEMO / "data"),
        "evaluation": {"limit": 3},
        **changes,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def keys(folder: Path, demo: Path, **changes: Any) -> dict[str, str]:
    """Key by label of an unquantized and a calibrated cell of a copy of ``demo``."""
    content = {
        "checkpoints": {"softmax": str(demo / "softmax")},
        "quantizers": ["fp32", {"name": "gptq-4bit", "group_size": 64}],
        "tasks": ["demo_choice"],
        "definitions": str(demo / "tasks"),
        "data": str(demo / "data"),
        "calibration": {"path": str(demo / "calibration.jsonl"), "samples": 2, "length": 64},
        **changes,
    }
    cells = plan(Recipe.load(small_recipe(folder, **content)), device="cpu").cells
    return {cell.label: cell.key for cell in cells}


def qbench(*arguments: object) -> int:
    """Exit code of a command run in this process."""
    return app([str(argument) for argument in arguments], standalone_mode=False) or 0


def run_small(folder: Path, *options: object, code: int = 0, **changes: Any) -> Store:
    """Run :func:`small_recipe`, of two blocks, on the CPU into ``folder``/out, which ends with
    ``code``."""
    path = small_recipe(folder, **{"checkpoints": blocks("softmax", "softpick"), **changes})
    assert qbench("run", path, "--out", folder / "out", "--device", "cpu", *options) == code
    return Store(folder / "out")
