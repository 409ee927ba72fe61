import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted.py")
LIMIT = 1e-5  # relative, float32 against the float64 reference


@pytest.mark.parametrize(
    ("groups", "count"),
    [("features", 53), ("shaped", 34), ("model operators refusals", 1 + 3 + 5)],
)
def test_kernels_in_the_interpreter_equal_the_reference(groups, count):
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES), *groups.split()],
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
