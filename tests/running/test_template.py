"""Worker processes that are forked from one that has imported what they share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from functools import partial

import pytest

from qbench import plugins
from qbench.running import template
from qbench.running.executors import Processes
from qbench.running.template import FORKS
from qbench.running.workers import First

PATIENCE = 60  # seconds that make a hang

pytestmark = pytest.mark.skipif(not FORKS, reason="processes are forked on Linux alone")


def share():
    """In the template: what its forks can see."""
    os.environ["SHARED_BY"] = str(os.getpid())


def arrive():
    os.environ["ARRIVED"] = str(os.getpid())


def alone():
    os.environ["ALONE"] = str(os.getpid())


FIRST = First(alone, share, arrive)


def told(seconds=0.0):
    time.sleep(seconds)
    return {
        "pid": os.getpid(), "parent": os.getppid(), "shared": os.environ.get("SHARED_BY"),
        "arrived": os.environ.get("ARRIVED"), "alone": os.environ.get("ALONE"),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }  # fmt: skip


@pytest.fixture
def pool():
    executor = Processes([0, 0], device="cpu", first=FIRST)
    yield executor
    executor.shutdown(cancel_futures=True)


def both(executor, seconds=0.5):
    """What two processes say at the same time."""
    calls = [executor.submit(told, seconds) for _ in range(2)]
    return [call.result(timeout=PATIENCE) for call in calls]


def test_what_is_shared_is_done_once_and_the_rest_in_each(pool):
    one, other = both(pool)
    assert one["pid"] != other["pid"]
    for found in (one, other):
        assert found["shared"] == str(found["parent"])
        assert found["arrived"] == str(found["pid"])
        assert found["alone"] is None


def test_one_process_is_started_by_itself():
    executor = Processes([0], device="cpu", first=FIRST)
    found = executor.submit(told).result(timeout=PATIENCE)
    executor.shutdown(cancel_futures=True)
    assert found["alone"] == str(found["pid"])
    assert found["shared"] is None


def test_each_sees_its_gpu_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    executor = Processes([0, 1], device="cuda", first=FIRST)
    try:
        assert {found["gpu"] for found in both(executor)} == {"5", "7"}
    finally:
        executor.shutdown(cancel_futures=True)


def test_a_process_that_is_killed_breaks_its_call_alone_and_is_forked_again(pool):
    calls = [pool.submit(told, 2.0) for _ in range(2)]
    wait_for(lambda: all(one.pid for one in pool.workers()))
    victim = pool.workers()[0].pid
    os.kill(victim, signal.SIGKILL)
    ended = [outcome(call) for call in calls]
    (good,) = [one for one in ended if isinstance(one, dict)]
    (bad,) = [one for one in ended if not isinstance(one, dict)]
    assert isinstance(bad, BrokenExecutor)
    after = both(pool)
    assert victim not in {one["pid"] for one in after}
    assert {one["shared"] for one in after} == {good["shared"]}


def test_where_the_template_is_killed_its_processes_end_and_others_start_alone(pool):
    before = both(pool)
    calls = [pool.submit(told, PATIENCE) for _ in range(2)]
    time.sleep(0.5)
    os.kill(before[0]["parent"], signal.SIGKILL)
    assert all(isinstance(outcome(call), BrokenExecutor) for call in calls)
    wait_for(lambda: not any(there(one["pid"]) for one in before))
    assert all(found["alone"] == str(found["pid"]) for found in both(pool))


def start_the_driver():
    template.driver_has_started = lambda: True


def test_where_an_import_has_started_the_gpus_driver_each_process_starts_alone():
    executor = Processes([0, 0], device="cpu", first=First(alone, start_the_driver, arrive))
    try:
        assert all(found["alone"] == str(found["pid"]) for found in both(executor))
    finally:
        executor.shutdown(cancel_futures=True)


def fail():
    raise RuntimeError("an import that fails")


def test_what_cannot_be_shared_is_said_by_the_call_that_needs_it():
    executor = Processes([0, 0], device="cpu", first=First(fail, fail, fail))
    try:
        assert all(found["arrived"] is None for found in both(executor))
    finally:
        executor.shutdown(cancel_futures=True)


class LocalError(Exception):
    """Cannot be made again from what it holds."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def raise_local():
    raise LocalError("both", "words")


def raise_value():
    raise ValueError("what is wrong")


def give_function():
    return lambda: None


def test_what_a_call_raises_or_cannot_give_is_raised_with_where_it_was(pool):
    with pytest.raises(ValueError, match="what is wrong") as caught:
        pool.submit(raise_value).result(timeout=PATIENCE)
    assert str(caught.value) == "what is wrong"
    assert "in raise_value" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="LocalError") as caught:
        pool.submit(raise_local).result(timeout=PATIENCE)
    assert str(caught.value) == "LocalError: both words"
    assert "in raise_local" in str(caught.value.__cause__)
    with pytest.raises(Exception, match="pickle"):
        pool.submit(give_function).result(timeout=PATIENCE)
    with pytest.raises(Exception, match="pickle"):
        pool.submit(print, lambda: None).result(timeout=PATIENCE)
    assert both(pool)  # and nothing has died of it


def share_torch():
    import torch

    torch.zeros(1)


def multiply():
    """Products and sums that PyTorch computes with several threads."""
    import torch

    torch.set_num_threads(2)
    torch.manual_seed(0)
    a = torch.randn(600, 600)
    return float((a @ a).sum() + a.exp().sum())


def test_forks_compute_with_several_threads_and_to_the_same_bits():
    """A fork of a process whose OpenMP has threads already would wait for ever."""
    found = []
    for slots in ([0], [0, 0]):
        executor = Processes(slots, device="cpu", first=First(share_torch, share_torch, arrive))
        try:
            found += [executor.submit(multiply) for _ in slots]
            found[-len(slots) :] = [one.result(timeout=PATIENCE) for one in found[-len(slots) :]]
        finally:
            executor.shutdown(cancel_futures=True)
    assert len(set(found)) == 1


PLUGIN = """
import torch
TABLE = float((torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum())
"""


def test_a_plugin_that_computes_when_it_is_imported_stops_no_fork(tmp_path, monkeypatch):
    """Each worker imports it by itself: a fork of OpenMP's threads would wait for ever."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(plugins, "_loaded", {})
    path = tmp_path / "computes_at_once.py"
    path.write_text(PLUGIN)
    plugins.load_file(path)
    executor = Processes([0, 0], device="cpu", first=First(share_torch, share_torch, arrive))
    try:
        calls = [executor.submit(multiply) for _ in range(2)]
        assert len({call.result(timeout=PATIENCE) for call in calls}) == 1
    finally:
        executor.shutdown(cancel_futures=True)
        sys.modules.pop("qbench_plugin_computes_at_once", None)


def fail_to_fork():
    real, left = os.fork, [2]

    def fork():
        left[0] -= 1
        if left[0] == -1:
            raise BlockingIOError("Resource temporarily unavailable")
        return real()

    os.fork = fork


def test_a_fork_that_fails_breaks_its_call_alone():
    executor = Processes([0, 0], device="cpu", first=First(alone, fail_to_fork, arrive))
    try:
        before = both(executor)
        os.kill(before[0]["pid"], signal.SIGKILL)
        wait_for(lambda: not there(before[0]["pid"]))
        ended = [outcome(executor.submit(told, 0.5)) for _ in range(2)]
        assert sum(isinstance(one, BrokenExecutor) for one in ended) == 1
        assert {found["shared"] for found in both(executor)} == {before[0]["shared"]}
    finally:
        executor.shutdown(cancel_futures=True)


def test_where_the_template_has_ended_no_call_of_many_breaks():
    for _ in range(3):
        executor = Processes([0] * 6, device="cpu", first=First(alone, start_the_driver, arrive))
        try:
            calls = [executor.submit(told) for _ in range(6)]
            assert not [one for one in map(outcome, calls) if isinstance(one, BrokenExecutor)]
        finally:
            executor.shutdown(cancel_futures=True)


def draw():
    import numpy as np

    time.sleep(0.5)
    return float(np.random.random())


def share_numpy():
    import numpy as np

    np.random.seed()


def test_forks_draw_each_for_itself():
    executor = Processes([0, 0], device="cpu", first=First(alone, share_numpy, arrive))
    try:
        calls = [executor.submit(draw) for _ in range(2)]
        assert len({call.result(timeout=PATIENCE) for call in calls}) == 2
    finally:
        executor.shutdown(cancel_futures=True)


SCRIPT = """
import os, sys, time
from qbench.running.executors import Processes
from qbench.running.workers import First

def nothing():
    pass

if __name__ == "__main__":
    pool = Processes([0, 0], device="cpu", first=First(nothing, nothing, nothing))
    calls = [pool.submit(os.getpid) for _ in range(2)]
    [call.result() for call in calls]
    print(pool._template.process.pid, *(one.pid for one in pool.workers() if one.pid), flush=True)
    pool.submit(time.sleep, 60), pool.submit(time.sleep, 60)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_is_killed(tmp_path, number):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 2
        assert all(there(pid) for pid in pids)
        parent.send_signal(number)
    wait_for(lambda: not any(there(pid) for pid in pids))


def test_a_template_that_is_still_busy_ends_at_once():
    executor = Processes([0, 0], device="cpu", first=First(fail, partial(time.sleep, PATIENCE)))
    call = executor.submit(told)
    begun = time.monotonic()
    executor.shutdown(cancel_futures=True)
    assert time.monotonic() - begun < 5
    with pytest.raises(BrokenExecutor):
        call.result(timeout=PATIENCE)


def outcome(call):
    try:
        return call.result(timeout=PATIENCE)
    except BrokenExecutor as error:
        return error


def there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
