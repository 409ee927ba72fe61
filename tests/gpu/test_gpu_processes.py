"""Worker processes that are forked, with a GPU each."""

import os

import pytest
import torch

from qbench.running.executors import Processes
from qbench.running.template import FORKS
from qbench.running.warm_up import first

PATIENCE = 120

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not FORKS, reason="processes are forked on Linux alone"),
]


def summed():
    import time

    import torch

    time.sleep(0.5)  # so that each of two processes has one
    return os.getpid(), os.getppid(), float((torch.ones(64, 64, device="cuda") @ torch.ones(
        64, 64, device="cuda")).sum())  # fmt: skip


def test_forked_processes_use_the_gpu_and_what_they_are_forked_from_does_not():
    executor = Processes([0, 0], device="cuda", first=first("cuda"))
    try:
        calls = [executor.submit(summed) for _ in range(2)]
        found = [call.result(timeout=PATIENCE) for call in calls]
        assert executor._template.lives()  # it ends where an import has started the driver
    finally:
        executor.shutdown(cancel_futures=True)
    assert {total for *_, total in found} == {64.0**3}
    assert len({pid for pid, *_ in found}) == 2
    assert {parent for _, parent, _ in found} == {executor._template.process.pid}
