"""Batches on their way to the device: the next ones are made while this one is computed on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qbench.training.order import Sequences, drawn

AHEAD = 4  # batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which sequences of a step this process takes, ``sequences`` at a time."""

    rows: int  # of a step, over all processes
    sequences: int
    process: int = 0
    processes: int = 1

    @property
    def passes(self) -> int:
        """Forward and backward passes of a step."""
        return self.rows // (self.sequences * self.processes)


def batches(
    source: Sequences, share: Share, *, first: int, steps: int, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """[sequences, context + 1] int64 on ``device``, ``share.passes`` of each step from ``first``.

    The rows of one step are the same, whatever the number of processes and passes.
    """
    pin = device.type == "cuda"

    def make(number: int) -> Tensor:
        step, part = divmod(number, share.passes)
        indices = drawn(step, rows=share.rows, of=len(source), seed=seed)
        begin = (part * share.processes + share.process) * share.sequences
        batch = torch.from_numpy(source.rows(indices[begin : begin + share.sequences]))
        return batch.pin_memory() if pin else batch

    numbers = iter(np.arange(first * share.passes, steps * share.passes).tolist())
    with ThreadPoolExecutor(1) as maker:
        coming: list[Future[Tensor]] = []
        while True:
            while len(coming) < AHEAD and (number := next(numbers, None)) is not None:
                coming.append(maker.submit(make, number))
            if not coming:
                return
            yield coming.pop(0).result().to(device, non_blocking=True)
