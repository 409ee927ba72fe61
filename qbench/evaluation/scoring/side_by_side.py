"""Packs on a CPU's cores side by side, where a GPU takes them one after another.

A pack's operations are small. Shared among cores, each waits for the slowest core, and between
operations all but one are idle; a core that has a pack to itself does neither.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

PACKS = 4  # at once at most, since each needs memory of its own


def packs_at_once(device: torch.device) -> int:
    return min(PACKS, torch.get_num_threads()) if device.type == "cpu" else 1


@contextlib.contextmanager
def side_by_side(at_once: int, stopped: threading.Event) -> Iterator[Callable[..., Iterator[Any]]]:
    """Gives what stands for ``map``, ``at_once`` at a time: results come in order, and the first
    error is raised.

    ``stopped`` is set at the end: where that comes early, by an error or Ctrl-C, work that looks
    at it ends soon.
    """
    threads = torch.get_num_threads()
    if at_once == 1:
        yield map
        return
    pool = ThreadPoolExecutor(at_once, "qbench-pack", torch.set_num_threads, (threads // at_once,))

    def each(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        if len(items) == 1:
            yield function(items[0])
            return
        # The first alone: in their first forward libraries set up what later ones share.
        for item in items[:1]:
            yield pool.submit(function, item).result()
        yield from pool.map(function, items[1:])

    try:
        yield each
    finally:
        stopped.set()
        try:
            pool.shutdown(cancel_futures=True)
        finally:  # a second Ctrl-C
            torch.set_num_threads(threads)  # MKL's number is one for the whole process
