"""Kernels in Triton's interpreter, which must be chosen before Triton is imported."""

import functools
import os
import subprocess
import sys
from pathlib import Path


@functools.cache
def interpreted() -> dict[str, str]:
    """What ``kernels_interpreted.py`` prints in a process of its own: what went wrong, by case."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("kernels_interpreted.py"))],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(line.split("\t") for line in ran.stdout.splitlines() if "\t" in line)
