import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("cache_interpreted.py")


def test_kernels_of_the_cache_in_the_interpreter_equal_their_definitions():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    off = {name: float(e) for name, e in (line.split("\t") for line in ran.stdout.splitlines())}
    assert len(off) == 5 + 3 + 3 + 10
    limit = {name: 0 if name.startswith("rounding") else 1e-5 for name in off}
    assert {name: e for name, e in off.items() if not e <= limit[name]} == {}
