"""The processes of one training: one on each GPU, as torchrun or accelerate start them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as distributed

from qbench.errors import UnavailableError


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """``index`` of ``count`` processes; each computes on ``device``."""

    device: torch.device
    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this one writes and speaks."""
        return self.index == 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes."""
        if self.count > 1:
            distributed.all_reduce(values)
            values /= self.count
        return values

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """What torchrun's environment variables say; alone without them.

    Raises UnavailableError for a GPU that is not there.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UnavailableError(
                f"process {local} of this host has no GPU of its own: {torch.cuda.device_count()} "
                "are visible; say torchrun --nproc-per-node with at most that"
            )
        torch.cuda.set_device(local)
    if count == 1:
        yield Processes(device=torch.device(device))
        return
    place = torch.device(device, local) if device == "cuda" else torch.device(device)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Processes(device=place, index=distributed.get_rank(), count=count)
    finally:
        distributed.destroy_process_group()
