import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("accepted.py")
CALLED = ["self", "target", "options", "codegen_fns", "module_map", "context"]


def test_triton_accepts_every_kernel_and_launches_are_the_same_the_second_time():
    compiler = pytest.importorskip("triton.compiler")
    if list(inspect.signature(compiler.ASTSource.make_ir).parameters) != CALLED:
        pytest.skip("this Triton's front end is called in another way")
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line.split("\t") for line in ran.stdout.splitlines()]
    assert len(lines) == 10 * 9
    for case, names, differing in lines:
        forward = "decode_kernel" if ", 1, " in case else "forward_kernel"
        assert {forward, "key_kernel", "query_kernel"} <= set(names.split(",")), case
        assert int(differing) == 0, case
