"""A process that is killed at any moment breaks its own call, and nobody waits for it.

No lock is shared that it could take with it: progress has a connection for each cell, and each
process a pool, with its queues, of its own.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import BrokenExecutor

import pytest

from qbench.running.executors import Processes
from qbench.running.relay import Relay
from qbench.sink import Silent

KILLS = 40
LATEST = 0.1  # seconds until the kill
PATIENCE = 60  # seconds that make a hang


def talk(address, cell):
    """A cell that does nothing but tell, in long and short messages."""
    sender = address.open()
    sender.begin(cell)
    while True:
        sender.step(cell, "step " * 2_000, total=1)
        sender.say("line")


class Heard(Silent):
    """Counts what a cell said."""

    def __init__(self):
        self.steps = 0

    def step(self, *_):
        self.steps += 1


def process_of(executor, earlier):
    """The process of the call that was just submitted; the ``earlier`` ones are dead."""
    found: list[int] = []

    def started():
        found[:] = [one.pid for one in executor._slots[0]._context.started if one.pid]
        return bool(found) and found[0] not in earlier

    wait_until(started)
    return found[0]


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
    started = [process for slot in executor._slots for process in slot._context.started]
    begun = time.monotonic()
    executor.terminate()
    assert time.monotonic() - begun < 1
    executor.shutdown(cancel_futures=True)
    assert not any(process.is_alive() for process in started)
    with pytest.raises((BrokenExecutor, RuntimeError)):
        executor.submit(os.getpid).result(timeout=PATIENCE)
