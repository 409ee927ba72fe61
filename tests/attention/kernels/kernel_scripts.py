"""A script of this folder, for which Triton must be told something before it is imported."""

import os
import subprocess
import sys
from pathlib import Path


def lines_of(script, *groups, seconds=280):
    """What it prints in a process of its own: a list of lines, each split at its tabs."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *groups],
        env=environment, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [line.split("\t") for line in ran.stdout.splitlines()]
