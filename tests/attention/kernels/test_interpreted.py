import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LIMIT = 1e-5  # relative, float32 against the float64 reference


@pytest.mark.parametrize(
    ("script", "groups", "count"),
    [
        ("interpreted.py", "features", 53),
        ("interpreted.py", "shaped", 34),
        ("interpreted.py", "model operators refusals", 1 + 3 + 5),
        ("repeated.py", "", 7),
        ("flags_interpreted.py", "", 11),
    ],
)
def test_kernels_in_the_interpreter_equal_the_reference(script, groups, count):
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / script), *groups.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    errors = dict(line.split("\t") for line in ran.stdout.splitlines())
    assert len(errors) == count
    assert {name: e for name, e in errors.items() if not float(e) <= LIMIT} == {}
