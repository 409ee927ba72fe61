"""Worker processes with a GPU each."""

import os

import torch

from qbench.runner.workers import Workers

PATIENCE = 120


def summed():
    import time

    time.sleep(0.5)  # so that each of two processes has one
    ones = torch.ones(64, 64, device="cuda")
    return os.getpid(), float((ones @ ones).sum())


def test_processes_use_the_gpu():
    with Workers([0, 0], device="cuda") as executor:
        found = [executor.submit(summed) for _ in range(2)]
        found = [call.result(timeout=PATIENCE) for call in found]
    assert {total for _, total in found} == {64.0**3}
    assert len({pid for pid, _ in found}) == 2
