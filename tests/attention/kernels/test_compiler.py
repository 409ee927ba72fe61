"""Kernels compile for Hopper without a GPU."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attention_cases import NORMALIZERS

CALLED = ["self", "target", "options", "codegen_fns", "module_map", "context"]


def lines_of(*normalizers):
    compiler = pytest.importorskip("triton.compiler")
    if list(inspect.signature(compiler.ASTSource.make_ir).parameters) != CALLED:
        pytest.skip("this Triton's front end is called in another way")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script = str(Path(__file__).with_name("compiler.py"))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", script, *normalizers],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [line.split("\t") for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    "normalizers", [("softpick",), pytest.param(NORMALIZERS, marks=pytest.mark.slow)], ids=len
)
def test_triton_accepts_every_kernel(normalizers):
    kernels = {}
    for case, kernel in lines_of(*normalizers):
        kernels.setdefault(case.split(",")[0], set()).add(kernel)
    every = {"attn_decode", "attn_bwd_dq", "attn_bwd_dkdv", "combine"}
    assert set(kernels) == set(normalizers)
    for normalizer, names in kernels.items():
        whole = every if normalizer in ("softmax", "softpick", "rectified", "sigmoid") else set()
        assert names == whole | {"attn_fwd", "hopper_bwd_dq", "hopper_bwd_dkdv"}, normalizer


def test_a_decode_step_of_wide_heads_compiles_down_to_machine_code():
    """Triton's pipeliner ended the process: values that may be left out, read by a warpgroup."""
    assert lines_of("wide decode") == [["attn_decode", "combine"]]
