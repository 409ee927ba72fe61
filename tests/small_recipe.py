"""A recipe of the bundled pair that runs in seconds."""

from pathlib import Path
from typing import Any

import yaml

from qbench.cli.app import app

DEMO = Path(__file__).parent.parent / "recipes" / "demo"


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


def qbench(*arguments: object) -> int:
    """Exit code of a command run in this process."""
    return app([str(argument) for argument in arguments], standalone_mode=False) or 0
