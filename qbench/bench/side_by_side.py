"""Calls in processes side by side on one GPU: most of what they do is compiling, on one core each.
Whatever ends the calls, no process is left beside what is measured next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from multiprocessing import active_children
from typing import Any

from qbench.runner.workers import Workers

MOST = 16  # processes by default: each takes half a GiB of the GPU's memory before it does anything


def default_jobs() -> int:
    """A process for each core but one."""
    return max(1, min(MOST, (os.cpu_count() or 2) - 1))


@contextmanager
def processes(jobs: int, device: str = "cuda") -> Iterator[Executor]:
    """An executor of ``jobs`` processes, which have all ended where the body has, by an error or
    Ctrl-C too. A process that dies breaks its own call, and another takes its place."""
    before = set(active_children())
    pool = Workers([0] * jobs, device=device)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
    assert set(active_children()) <= before, "a process outlived its pool"


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in such a process: on one core, and its memory given back to the
    neighbours on the GPU."""
    import torch

    torch.set_num_threads(1)
    found = function(*arguments)
    torch.cuda.empty_cache()
    return found
