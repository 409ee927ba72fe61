"""What this host computes on, asked of NVML: here of one that says what a test wants."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pynvml
import pytest
import torch

from qbench import machine
from qbench.errors import RecipeError, UnavailableError

NAMES = ["NVIDIA H200", "NVIDIA H200", "NVIDIA H200"]


@pytest.fixture
def nvml(monkeypatch):
    """A host with these GPUs, whose driver knows this CUDA; PyTorch would see none of them."""

    def install(names=NAMES, cuda=13000, build="13.0", **environment):
        monkeypatch.delenv(machine.VISIBLE, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def handle(which):
            index = which if isinstance(which, int) else ["GPU-a", "GPU-b"].index(which)
            if index >= len(names):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return index

        answers = {
            "Init": lambda: None,
            "DeviceGetCount": lambda: len(names),
            "DeviceGetHandleByIndex": handle,
            "DeviceGetHandleByUUID": handle,
            "DeviceGetName": lambda index: names[index],
            "DeviceGetMemoryInfo": lambda index: SimpleNamespace(total=2**30 * (index + 1)),
            "SystemGetCudaDriverVersion": lambda: cuda,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, f"nvml{name}", answer)
        monkeypatch.setattr(machine, "torch_cuda", lambda: build)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        machine.visible_gpus.cache_clear()
        machine.cuda_problem.cache_clear()

    yield install
    machine.visible_gpus.cache_clear()
    machine.cuda_problem.cache_clear()


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({}, "None"),
        ({"cuda": 13010}, "None"),
        ({"cuda": 12040}, "the driver supports CUDA 12.4, PyTorch needs 13.0"),
        ({"names": []}, "no NVIDIA GPU is visible here"),
        ({"build": None}, "PyTorch is built without CUDA"),
    ],
)
def test_a_gpu_is_used_where_driver_and_pytorch_agree(nvml, answers, problem):
    nvml(**answers)
    assert problem in str(machine.cuda_problem())


@pytest.mark.parametrize(("visible", "seen"), [("2,0", [2, 0]), ("GPU-b", [1])])
def test_gpus_are_those_that_this_process_may_use(nvml, visible, seen):
    nvml(CUDA_VISIBLE_DEVICES=visible)
    assert [gpu.memory_gib for gpu in machine.visible_gpus()] == [index + 1 for index in seen]
    assert machine.memory_gib("cuda") == seen[0] + 1


def test_without_a_driver_cuda_is_refused_in_one_line(nvml, monkeypatch):
    nvml()

    def refused():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refused)
    assert machine.choose_device("auto") == "cpu"
    with pytest.raises(UnavailableError, match=r"--device cuda: no .*GPU.*; use --device cpu"):
        machine.choose_device("cuda")
    with pytest.raises(UnavailableError, match=r"device 'gpu': must be auto, cpu or cuda"):
        machine.choose_device("gpu")


@pytest.mark.parametrize(
    ("gpus", "workers", "device", "cells", "slots"),
    [
        (None, None, "cpu", 9, []), (None, 1, "cpu", 9, []), (None, 2, "cpu", 9, [0, 0]),
        (None, None, "cuda", 9, [0, 0, 0]), ("2", 2, "cuda", 9, [0, 1, 0, 1]),
        ("all", 1, "cuda", 9, [0, 1, 2]), ("all", 2, "cuda", 4, [0, 1, 2, 0]),
    ],
)  # fmt: skip
def test_worker_processes_are_spread_over_gpus(nvml, gpus, workers, device, cells, slots):
    nvml()
    assert machine.gpu_slots(gpus, workers, device, at_most=cells) == slots


@pytest.mark.parametrize(
    ("gib", "gpus", "cores", "cells"),
    [(8, 1, 16, 4), (24, 1, 16, 4), (25, 1, 16, 3), (8, 2, 16, 4), (8, 1, 4, 3)],
)
def test_small_models_share_a_gpu_more_ways(monkeypatch, gib, gpus, cores, cells):
    monkeypatch.setattr(machine, "memory_gib", lambda device: 139.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    assert machine.cells_per_gpu(gib, gpus) == cells


def test_a_gpu_that_refuses_all_further_work_is_told_of_and_ends_no_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(machine, "_broken_device", None)
    monkeypatch.setattr(machine, "free", refuse)
    error = machine.attempt(lambda: refuse(), tmp_path / "log", "cuda")
    assert error == "RuntimeError: " + BROKEN + " (the traceback is in its log)"
    assert BROKEN in machine.broken_device()


BROKEN = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("gpus", ["0", "4", "x", "-1"])
def test_gpus_that_are_not_there_are_refused(nvml, gpus):
    nvml()
    with pytest.raises(RecipeError, match="a number from 1 to 3"):
        machine.gpu_slots(gpus, None, "cuda")
    with pytest.raises(RecipeError, match="computes on the CPU"):
        machine.gpu_slots(gpus, None, "cpu")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad"), "ValueError: bad (the traceback is in its log)"),
        (SystemExit(3), "SystemExit: 3 (the traceback is in its log)"),
    ],
)
def test_whatever_ends_a_cells_work_is_one_line(tmp_path, error, line):
    def work():
        raise error

    assert machine.attempt(work, tmp_path / "log", "cpu") == line


def test_threads_attempt_one_after_the_other(tmp_path, capfd):
    """They share file descriptors, which go to a cell's log, and torch's default dtype."""
    at_work = []

    def work(name):
        at_work.append(name)
        print(name)
        time.sleep(0.02)
        assert at_work == [name]
        at_work.remove(name)

    with ThreadPoolExecutor(4) as threads:
        jobs = [
            threads.submit(machine.attempt, partial(work, f"cell {i}"), tmp_path / str(i), "cpu")
            for i in range(4)
        ]
        assert [job.result() for job in jobs] == [None] * 4
    assert [(tmp_path / str(i)).read_text() for i in range(4)] == [f"cell {i}\n" for i in range(4)]
    print("shown")
    assert capfd.readouterr().out == "shown\n"
