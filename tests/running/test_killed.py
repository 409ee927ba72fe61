"""A process that is killed at any moment breaks its own call, and nobody waits for it.

No lock is shared that it could take with it: progress has a connection for each cell, and each
process a connection of its own.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import BrokenExecutor

import pytest

from qbench.progress import SilentProgress
from qbench.running import executors
from qbench.running.executors import Processes
from qbench.running.relay import Relay

KILLS = 40
LATEST = 0.1  # seconds until the kill
PATIENCE = 60  # seconds that make a hang


def talk(address, cell):
    """A cell that does nothing but tell, in long and short messages."""
    sender = address.open()
    sender.begin(cell)
    while True:
        sender.stage(cell, "step " * 2_000, total=1)
        sender.log("line")


class Heard(SilentProgress):
    """Counts what a cell said."""

    def __init__(self):
        self.steps = 0

    def stage(self, *_):
        self.steps += 1


def process_of(executor, earlier):
    """The process of the call that was just submitted; the ``earlier`` ones are dead."""
    found: list[int] = []

    def started():
        found[:] = [one.pid for one in executor.workers() if one.pid]
        return bool(found) and found[-1] not in earlier

    wait_until(started)
    return found[-1]


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_forty_kills_at_random_moments_hang_nobody():
    draw, heard, killed, begun = random.Random(0), Heard(), [], []
    executor = Processes([0], device="cpu")
    try:
        with Relay(heard) as relay:
            for kill in range(KILLS):
                cell = f"cell-{kill}"
                call = executor.submit(talk, relay.address, cell)
                killed.append(process_of(executor, killed))
                if kill % 2:  # while it speaks; else while it starts, or then
                    wait_until(lambda cell=cell: cell in relay.begun)
                time.sleep(draw.uniform(0, LATEST))
                os.kill(killed[-1], signal.SIGKILL)
                with pytest.raises(BrokenExecutor):
                    call.result(timeout=PATIENCE)
                if cell in relay.begun:
                    assert relay.beside(cell) == frozenset()
                    begun.append(cell)
        assert executor.submit(os.getpid).result(timeout=PATIENCE) not in killed
    finally:
        executor.shutdown(cancel_futures=True)
    assert len(begun) >= KILLS // 2
    assert heard.steps > 0


def test_processes_that_are_told_to_end_do_so_beside_other_work():
    executor = Processes([0, 0], device="cpu")
    calls = [executor.submit(time.sleep, 0) for _ in range(2)]
    assert [call.result(timeout=PATIENCE) for call in calls] == [None, None]
    started = executor.workers()
    begun = time.monotonic()
    executor.terminate()
    assert time.monotonic() - begun < 1
    executor.shutdown(cancel_futures=True)
    assert all(process.ended(0) for process in started)
    with pytest.raises((BrokenExecutor, RuntimeError)):
        executor.submit(os.getpid).result(timeout=PATIENCE)


def until(path):
    wait_until(path.exists)
    return os.getpid()


@pytest.mark.parametrize("idle_ends", [True, False])
def test_a_process_that_nothing_is_left_for_ends_while_others_work(tmp_path, idle_ends):
    """A GPU takes a moment to let go of one: not all of them at the end, then."""
    executor = Processes([0, 0], device="cpu", idle_ends=idle_ends)
    try:
        long = executor.submit(until, tmp_path / "go")
        short = executor.submit(os.getpid).result(timeout=PATIENCE)
        (idle,) = (process for process in executor.workers() if process.pid == short)
        assert idle.ended(PATIENCE if idle_ends else 0.2) == idle_ends
        assert not long.done()
        # one that comes nevertheless has a process, and who waits for nobody keeps his
        later = executor.submit(os.getpid).result(timeout=PATIENCE)
        assert (later != short) == idle_ends
        (tmp_path / "go").touch()
        kept = long.result(timeout=PATIENCE)
        again = {executor.submit(os.getpid).result(timeout=PATIENCE) for _ in range(2)}
        assert kept in again
    finally:
        executor.shutdown(cancel_futures=True)
    assert all(process.ended(0) for process in executor.workers())


def test_no_process_ends_that_a_waiting_call_can_have():
    executor = Processes([0, 0], device="cpu", idle_ends=True)
    try:
        calls = [executor.submit(_slowly) for _ in range(9)]
        assert len({call.result(timeout=PATIENCE) for call in calls}) <= 2
    finally:
        executor.shutdown(cancel_futures=True)


def _slowly():
    time.sleep(0.1)
    return os.getpid()


def test_where_no_process_can_be_started_the_call_breaks_and_a_later_one_runs(monkeypatch):
    executor = Processes([0], device="cpu")
    try:
        with monkeypatch.context() as full:
            full.setattr(executors, "spawned", _no_room)
            with pytest.raises(BrokenExecutor, match="cannot be started: Too many open files"):
                executor.submit(os.getpid).result(timeout=PATIENCE)
        assert executor.submit(os.getpid).result(timeout=PATIENCE) != os.getpid()
    finally:
        executor.shutdown(cancel_futures=True)


def _no_room(*_, **__):
    raise OSError("Too many open files")
