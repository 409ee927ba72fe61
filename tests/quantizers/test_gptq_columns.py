"""The kernel of GPTQ's columns against the library's loop, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

from columns_loop import CASES


def test_the_kernel_of_columns_in_the_interpreter_is_the_librarys_loop_to_the_bit():
    script = Path(__file__).with_name("columns_interpreted.py")
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    wrong = dict(line.split("\t") for line in ran.stdout.splitlines() if "\t" in line)
    assert len(wrong) == len(CASES)
    assert {case: places for case, places in wrong.items() if places} == {}
