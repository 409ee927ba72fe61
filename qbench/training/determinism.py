"""The same bits from the same start: what resuming to the bit rests on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read when cuBLAS starts


def settle_workspace() -> None:
    """Before anything is computed on a GPU: without it cuBLAS may sum in another order from one
    process to the next. What the user set stays."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the body torch's operators, and the kernels that its compiler chooses, give the same
    bits every time, or raise where they cannot; not so where that is not ``wanted``."""
    from torch._inductor import config

    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # The compiler measures kernels against each other, and the fastest may sum in another order.
    choosing = getattr(config, "deterministic", None)
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    if choosing is not None:
        config.deterministic = wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        if choosing is not None:
            config.deterministic = choosing
