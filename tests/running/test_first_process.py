"""On a GPU the first process starts before the recipe is read, others when cells are known."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from qbench.cli.job import Job, first_process, placed
from qbench.errors import UnavailableError
from qbench.machine import devices
from qbench.running.executors import Processes
from qbench.running.workers import First

HERE = {"gpus": None, "workers": None, "own": None}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as the parent of processes asks."""
    monkeypatch.setattr(devices, "choose_device", lambda wanted: "cuda")
    monkeypatch.setattr(devices, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "cuda_is_likely", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("cells", "processes"), [(1, 1), (2, 2), (18, 3)])
def test_as_many_processes_as_cells_and_the_first_of_them_at_once(cells, processes):
    with first_process("auto", None, **HERE) as first:
        assert len(first._slots) == 1
        assert len(first.workers()) == 1
        job = Job(recipe=None, out=Path("out"), device="cuda")
        with placed(job, "auto", None, **HERE, cells=cells, first=first) as place:
            assert place.executor is first
            assert place.at_once == len(first._slots) == processes
            started = first.workers()
            place.end()
        assert len(started) == processes
    assert all(one.ended(0) for one in started)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "cluster", "where", "asks"),
    [("auto", None, {"gpus": "all"}, True), ("cuda", None, {"gpus": "2"}, True),
     ("cpu", None, {"gpus": "all"}, False), ("auto", "local:2", {"gpus": "2"}, False)],
)  # fmt: skip
def test_where_gpus_are_to_be_counted_the_driver_starts_beside_the_imports(
    monkeypatch, device, cluster, where, asks
):
    asked = threading.Event()
    monkeypatch.setattr(devices, "cuda_problem", asked.set)
    with first_process(device, cluster, **(HERE | where)) as first:
        assert first is None
        assert asked.wait(10 if asks else 0.2) == asks


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("cluster", "where"),
    [("local:2", HERE), (None, {**HERE, "own": "someone's"}), (None, {**HERE, "gpus": "2"})],
)
def test_none_starts_here_where_cells_run_elsewhere(cluster, where):
    with first_process("auto", cluster, **where) as first:
        assert first is None


def test_none_starts_on_a_cpu():
    with first_process("cpu", None, **{**HERE, "workers": 2}) as first:
        assert first is None


def test_a_driver_without_a_gpu_leaves_no_process(monkeypatch):
    monkeypatch.setattr(devices, "cuda_is_likely", lambda: True)
    monkeypatch.setattr(devices, "cuda_problem", lambda: "no GPU is visible here")
    with first_process("auto", None, **HERE) as first:
        assert first is None
        assert not multiprocessing.active_children()
    with pytest.raises(UnavailableError, match="no GPU"), first_process("cuda", None, **HERE):
        pass
    assert not multiprocessing.active_children()


def test_processes_begin_while_their_parent_is_busy(tmp_path):
    """As with planning: what a process is sent after its start waits for the parent's turn."""
    first = First(partial(Path.touch, tmp_path / "begun"))
    executor = Processes([0], device="cpu", first=first)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(100)  # this thread alone, for as long as it computes
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
        assert (tmp_path / "begun").exists()
    finally:
        sys.setswitchinterval(usual)
        executor.shutdown(cancel_futures=True)


def test_processes_that_come_later_share_the_cores():
    executor = Processes([0], device="cpu", first=First(os.getpid), at_most=2)
    executor.start([0])
    with executor:
        threads = [executor.submit(os.getenv, "OMP_NUM_THREADS") for _ in range(2)]
        found = {one.result(timeout=60) for one in threads}
    expected = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // 2))
    assert found == {expected}
