"""Gradients averaged over the processes of a training: after the passes, or while they last."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from qbench.training.compute import Compute
from qbench.training.model import DTYPES
from qbench.training.processes import Processes


def average_gradients(parameters: Iterable[nn.Parameter], processes: Processes, dtype: str) -> None:
    """Replace each gradient by its mean over the processes, which add up in ``dtype``.

    All travel in one group, where they lie. Parameters without a gradient, the same ones in every
    process, keep none.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sent = [grad.to(DTYPES[dtype]) for grad in grads]  # themselves, where that is their dtype
    options = distributed.AllreduceCoalescedOptions()
    if means := processes.device.type == "cuda":  # gloo has sums alone
        options.reduceOp = distributed.ReduceOp.AVG
    distributed.group.WORLD.allreduce_coalesced(sent, options).wait()
    for grad, total in zip(grads, sent, strict=True):
        if grad is not total:
            grad.copy_(total)
        if not means:
            grad /= processes.count


def averaging_as_they_come(
    loss: nn.Module, processes: Processes, compute: Compute
) -> DistributedDataParallel:
    """``loss``, whose gradients are averaged during its backward pass: for a model compiled layer
    by layer, which gives those of its last layers first."""
    place = processes.device
    parallel = DistributedDataParallel(
        loss,
        device_ids=[place.index] if place.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if compute.travel == "bfloat16":
        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel
