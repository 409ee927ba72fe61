"""What this host computes on, asked of the CUDA driver: here of one that we compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from qbench import machine
from qbench.errors import RecipeError, UnavailableError

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name) { const char *v = getenv(name); return v ? atoi(v) : 0; }
int cuInit(unsigned flags) { return number("FAKE_INIT"); }
int cuDeviceGetCount(int *count) { *count = number("FAKE_COUNT"); return 0; }
int cuDriverGetVersion(int *version) { *version = number("FAKE_VERSION"); return 0; }
int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal; return ordinal < number("FAKE_COUNT") ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) {
  strncpy(name, device ? "NVIDIA L4" : "NVIDIA H200", length); return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=folder,
                   check=True)  # fmt: skip
    return folder


def ask(driver, code, build="13.0", **answers):
    code = f"from qbench import machine as d; d.torch_cuda = lambda: {build!r}; {code}"
    told = {f"FAKE_{name.upper()}": str(value) for name, value in answers.items()}
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), **told}
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                          check=True, env=environment)  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"count": 2, "version": 13000}, "None"),
        ({"count": 2, "version": 13010, "build": "13.0"}, "None"),
        ({"count": 2, "version": 12040}, "the driver knows CUDA 12.4, PyTorch is built for 13.0"),
        ({"count": 0, "version": 13000}, "no GPU is visible here"),
        ({"init": 100}, "no GPU is visible here"),
        ({"init": 999}, "the CUDA driver does not start (error 999)"),
        ({"count": 2, "version": 13000, "build": None}, "PyTorch is built without CUDA"),
    ],
)
def test_a_gpu_is_used_where_driver_and_pytorch_agree(driver, answers, problem):
    assert problem in ask(driver, "print(d.cuda_problem())", **answers)


def test_names_and_numbers_of_gpus_come_from_the_driver(driver):
    code = "print(d.choose_device('auto'), d.device_count(), d.device_name(), d.device_name(1))"
    shown = ask(driver, code, count=2, version=13000)
    assert shown == "cuda 2 NVIDIA H200 NVIDIA L4"


def test_without_a_driver_cuda_is_refused_in_one_line(tmp_path):
    code = "from qbench import machine as d; d.torch_cuda = lambda: '13.0'\n"
    code += "d.DRIVER = 'libno_such_driver.so.1'; print(d.choose_device('auto'))\n"
    code += "try: d.choose_device('cuda')\nexcept Exception as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == [
        "cpu",
        "--device cuda: no NVIDIA driver is here (libno_such_driver.so.1); say --device cpu",
    ]


def test_the_build_of_pytorch_is_read_without_importing_it():
    import torch

    assert machine.torch_cuda() == torch.version.cuda


@pytest.mark.parametrize(
    ("gpus", "workers", "device", "slots"),
    [
        (None, None, "cpu", []), (None, 1, "cpu", []), (None, 2, "cpu", [0, 0]),
        (None, None, "cuda", [0, 0, 0]), ("2", 2, "cuda", [0, 1, 0, 1]),
        ("all", 1, "cuda", [0, 1, 2]),
    ],
)  # fmt: skip
def test_worker_processes_are_spread_over_gpus(monkeypatch, gpus, workers, device, slots):
    monkeypatch.setattr(machine, "device_count", lambda: 3)
    assert machine.gpu_slots(gpus, workers, device, 3) == slots


@pytest.mark.parametrize(
    ("cells", "slots"),
    [
        (1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 2]), (5, [0, 1, 2, 2, 1]),
        (6, [0, 1, 2, 0, 1, 2]), (7, [0, 1, 2, 0, 1, 2]),
    ],
)  # fmt: skip
def test_processes_that_are_left_over_go_to_the_last_gpus(monkeypatch, cells, slots):
    """What takes longest begins first, on the first ones."""
    monkeypatch.setattr(machine, "device_count", lambda: 3)
    assert machine.gpu_slots("all", 2, "cuda", 3, at_most=cells) == slots


@pytest.mark.parametrize("gpus", ["0", "4", "x", "-1"])
def test_gpus_that_are_not_there_are_refused(monkeypatch, gpus):
    monkeypatch.setattr(machine, "device_count", lambda: 3)
    with pytest.raises(RecipeError, match="a number from 1 to 3"):
        machine.gpu_slots(gpus, None, "cuda", 3)
    with pytest.raises(RecipeError, match="computes on the CPU"):
        machine.gpu_slots(gpus, None, "cpu", 3)


def test_cuda_that_cannot_be_had_is_refused():
    if machine.cuda_problem() is None:
        pytest.skip("there is a GPU here")
    with pytest.raises(UnavailableError, match=r"--device cuda: .*; say --device cpu"):
        machine.choose_device("cuda")
