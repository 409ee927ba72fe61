"""A script of kernels in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def results_of(script: str) -> dict[str, str]:
    """What ``script``, a file of this folder, prints in a process of its own: of each line that
    has a tab the part before it → the part behind it."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(line.split("\t") for line in ran.stdout.splitlines() if "\t" in line)
