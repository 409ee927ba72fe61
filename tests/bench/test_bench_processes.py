"""Calls in real processes, which are gone afterwards."""

import os
import time
from concurrent.futures import BrokenExecutor
from multiprocessing import active_children

import pytest

from qbench.bench.attention_warm_up import warm_up
from qbench.bench.side_by_side import alone, default_jobs, processes

PATIENCE = 120  # seconds that make a hang


def late(number):
    time.sleep(0.3 - 0.1 * number)
    return number


def refused():
    raise ValueError("softpick, bfloat16: no such tile")


def threads():
    import torch

    return torch.get_num_threads()


def failing(_):
    yield {"kernel": "one"}
    raise RuntimeError("an illegal memory access")


def said(_):
    return [{"kernel": "one", "error": "does not run here"}]


def measured(_):
    return [{"kernel": "one"}]


def erring(pool, waiting):
    waiting += [pool.submit(time.sleep, 600), pool.submit(time.sleep, 600)]
    pool.submit(alone, refused).result(timeout=PATIENCE)


def interrupted(pool, waiting):
    waiting += [pool.submit(time.sleep, 600), pool.submit(time.sleep, 600)]
    raise KeyboardInterrupt


def test_results_come_in_the_order_of_the_calls():
    before = set(active_children())
    with processes(2, device="cpu") as pool:
        calls = [pool.submit(late, number) for number in range(3)]
        assert [call.result(timeout=PATIENCE) for call in calls] == [0, 1, 2]
        assert set(active_children()) > before
    assert set(active_children()) <= before


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (erring, ValueError, "^softpick, bfloat16: no such tile$"),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_an_error_or_an_interrupt_leaves_no_process(body, error, words):
    before, begun, waiting = set(active_children()), time.monotonic(), []

    def run():
        with processes(3, device="cpu") as pool:
            pool.submit(os.getpid).result(timeout=PATIENCE)
            body(pool, waiting)

    with pytest.raises(error, match=words):
        run()
    assert set(active_children()) <= before
    for call in waiting:  # one that no thread had taken up is cancelled
        assert call.cancelled() or call.exception(timeout=PATIENCE) is not None
    assert time.monotonic() - begun < PATIENCE


def test_a_warm_up_that_fails_ends_its_process_and_the_next_call_has_another():
    with processes(1, device="cpu") as pool:
        first = pool.submit(os.getpid).result(timeout=PATIENCE)
        for broken in (failing, said):
            with pytest.raises(BrokenExecutor):
                pool.submit(warm_up, broken, None).result(timeout=PATIENCE)
        assert pool.submit(warm_up, measured, None).result(timeout=PATIENCE) is None
        assert pool.submit(alone, threads).result(timeout=PATIENCE) == 1
        assert pool.submit(os.getpid).result(timeout=PATIENCE) != first


def test_a_core_is_left_to_the_process_that_waits(monkeypatch):
    for cores, jobs in ((None, 1), (1, 1), (2, 1), (16, 15), (96, 16)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert default_jobs() == jobs
